"""What a broken contract raises."""

from keyhole.errors import KeyholeError


class ContractBroken(KeyholeError, AssertionError):
    """The oracle or learner under test breaks a rule; the message says which."""


def require(holds: bool, rule: str) -> None:
    """Raises ContractBroken with the rule, unless it holds."""
    if not holds:
        raise ContractBroken(rule)
