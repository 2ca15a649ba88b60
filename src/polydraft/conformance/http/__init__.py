"""Tests of servers over HTTP: whether what they write follows the law of a model that lies here."""
