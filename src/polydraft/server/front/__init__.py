"""The front: everything between the network and the worker."""
