"""A pytest plugin: the catalogue has the line of the new rule before any test is collected."""


def pytest_sessionstart() -> None:
    """Add the line; the package must not be imported earlier, since its type checks are put in while it is."""
    from new_rule import LINE

    import polydraft.catalogue.tables as tables

    tables.RULES = (*tables.RULES, LINE)
