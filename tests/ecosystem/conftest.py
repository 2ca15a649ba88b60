"""Tests with the packages of others: `make test-ecosystem` installs them in an environment of their own."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here asks a hub, and no library of these may
