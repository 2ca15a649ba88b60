"""Every scheme as an instance, those first that draft most for a user who has no preference."""

from polydraft.schemes.conditional_poisson import ConditionalPoisson
from polydraft.schemes.coupled import Coupled
from polydraft.schemes.given import Given
from polydraft.schemes.iid import IID
from polydraft.schemes.product import Product
from polydraft.schemes.scheme import Scheme
from polydraft.schemes.spec_hub import SpecHub
from polydraft.schemes.top import TopK
from polydraft.schemes.top_then import TopThenIID, TopThenSample
from polydraft.schemes.without_replacement import WithoutReplacement

EVERY_SCHEME: tuple[Scheme, ...] = (
    Given(),
    TopK(),
    WithoutReplacement(),
    TopThenSample(),
    IID(),
    Product(),
    TopThenIID(1),
    ConditionalPoisson(),
    SpecHub(),
    Coupled(),
)
