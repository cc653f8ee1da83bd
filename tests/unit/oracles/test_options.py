"""The typed options are those that the openers have."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.oracles.http.client import Access
from keyhole.oracles.http.json_endpoint import open_json
from keyhole.oracles.http.open_inference import open_inference
from keyhole.oracles.hugging_face import open_hf
from keyhole.oracles.language_model.endpoint import open_endpoint
from keyhole.oracles.onnx import open_onnx
from keyhole.oracles.open import open_gguf
from keyhole.oracles.options import BoxOptions, EndpointOptions, LanguageModelOptions
from keyhole.oracles.torch import open_torch


def list_keywords(*openers: Callable[..., Any]) -> set[str]:
    every = [p for opener in openers for p in inspect.signature(opener).parameters.values()]
    return {p.name for p in every if p.kind is p.KEYWORD_ONLY} - {"access", "batch"}


def test_endpoints() -> None:
    assert {field.name for field in fields(Access)} == set(EndpointOptions.__annotations__)


def test_boxes() -> None:
    openers = (open_torch, open_hf, open_gguf, open_onnx, open_json, open_inference)
    known = list_keywords(*openers) | set(EndpointOptions.__annotations__)
    assert known == set(BoxOptions.__annotations__)


def test_language_models() -> None:
    known = list_keywords(open_endpoint) | set(EndpointOptions.__annotations__)
    assert known == set(LanguageModelOptions.__annotations__)


def test_an_option_of_another_kind_of_box_is_named() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="no option rate"):
        keyhole.open_oracle(lambda tokens: np.zeros(len(tokens)), width=3, rate=2.0)
