"""Ray's object store when it is full: wait for what others give up, then say so."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from verl.errors import ClusterError

STORE_FULL = (ObjectStoreFullError, OutOfDiskError)
"""What Ray raises, also from tasks, where an object has no place in memory and none on the disk it is moved to."""

FULL_SECONDS = 10.0
RETRY_SECONDS = 0.25


def stored(value: Any) -> Any:
    """A reference to a copy of ``value``. A full store moves objects to disk; where that is full as well, this waits.

    Ray itself gives up at once then, although objects that nobody needs any more leave the store only after a second.

    Raises:
        ClusterError: there was no room for it within ``FULL_SECONDS``.
    """
    end = time.monotonic() + FULL_SECONDS
    while True:
        try:
            return ray.put(value)
        except STORE_FULL as error:
            if time.monotonic() >= end:
                raise store_full() from error
            time.sleep(RETRY_SECONDS)


def store_full() -> ClusterError:
    """For the user, once waiting has not helped."""
    error = ClusterError(
        "a batch does not fit into Ray's object store, and the disk that it is moved to when that is full has no room",
        None,
        "free space on the disk of Ray's session (/tmp/ray; Ray fills a disk to 95 %), or lower data.train_batch_size; "
        "start the same command again to go on from the last checkpoint",
    )
    error.bad_input = False
    return error
