"""The checker that pytest puts around polydraft: beartype, with int counting as float as in every type checker."""

from beartype import BeartypeConf, beartype

typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
