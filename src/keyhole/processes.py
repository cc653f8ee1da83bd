"""Worker processes that end with the process they work for, however that ends."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """Lets this worker end as soon as its parent is gone; the initializer of a pool.

    A parent that is killed tells its workers nothing: they would wait for work, and hold memory and
    journals, without end.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
