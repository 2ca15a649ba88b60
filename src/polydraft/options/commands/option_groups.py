"""Options that several commands have, and the headings under which help shows them."""

from dataclasses import dataclass

from polydraft.errors import InvalidParameter, shown
from polydraft.options.option import LARGEST_COUNT, LARGEST_SEED, Option, ServerField
from polydraft.options.sampling_options import SAMPLING, Sampling
from polydraft.options.value_checks import device_name, filled, folder_to_write, model_name, precision, to_read

MODELS, DRAFTING = "Models", "Drafting"
PROMPTS, MEASURING, OUTPUT, FILES = "Prompts", "Measuring", "Output", "Files of prompts"

TARGET = Option(
    "Target model: folder, .gguf file, hub name, smollm2, or pair. Default: embedded pair.",
    MODELS,
    metavar="MODEL",
    check=model_name,
)
DRAFT = Option(
    "Draft model with the same tokens: as --target; or self:int8, self:int4, self:skip=12-19, self:exit=8, "
    "self:keys=snap:512, the target itself in part; or mtp, its own modules; or a stack of drafters such as "
    "'self:int8 < ngram'.",
    MODELS,
    metavar="MODEL",
    check=model_name,
)
WEIGHTS = Option(
    "int8 or int4: round the target's weights to so many bits, on a CPU; the texts are that target's.",
    MODELS,
    metavar="NAME",
    words=("int8", "int4"),
)
DTYPE = Option("auto, float32, bfloat16, float16 or float64.", MODELS, metavar="NAME", check=precision)
PARALLEL = Option(
    "Share the target among so many processes, one a GPU; mlp:2 leaves attention whole in each (docs/parallel.md).",
    MODELS,
    metavar="N",
    words="parallel",
)
RAY = Option(
    "Run copies of the model in a Ray cluster: that of --address, else one of this machine alone (docs/scaling.md).",
    MODELS,
)
ADDRESS = Option(
    "HOST:PORT of a Ray cluster, of which this machine is a node. Default: that of RAY_ADDRESS, if there is one.",
    MODELS,
    metavar="ADDRESS",
)
REPLICAS = Option(
    "How many copies there are in the cluster, or at least and at most. Default: 1.", MODELS, metavar="N|MIN:MAX"
)
COPY_THREADS = Option(
    "CPU threads of each copy in the cluster, which it has alone. Default: 1.",
    MODELS,
    least=1,
    largest=LARGEST_COUNT,
)
DEVICE = Option("auto, cpu, cuda, cuda:1, ...", MODELS, metavar="NAME", check=device_name)
DRAFT_DEVICE = DEVICE.but(help="Where the draft model lies. Default: beside the target.")
DRAFTER = Option(
    "Who drafts: {words}; or FILE.py:CLASS. Default: model if there is one, else merge; when sampling, route.",
    DRAFTING,
    metavar="NAME",
    words="drafter",
    field=ServerField(longest=200),
)
VERIFIER = Option(
    "Verification rule: {words}; or FILE.py:CLASS.",
    DRAFTING,
    metavar="NAME",
    words="verifier",
    field=ServerField(longest=100),
)
SCHEME = Option(
    "How drafts are drawn, for rules that know several ways: {words}.",
    DRAFTING,
    metavar="NAME",
    words="scheme",
)
BOTTOM_UP = Option("Verify whole paths from the leaves up, instead of node by node.", DRAFTING)
TREE = Option("{words} (docs/trees.md).", DRAFTING, metavar="TREE", words="tree", field=ServerField(longest=200))
PROMPT_FILES = Option(
    "A file of JSON lines or plain text, or humaneval, gsm8k, python, edits, spec-bench-mini, spec-bench; "
    "may be repeated.",
    PROMPTS,
    metavar="FILE",
    check=filled,
)
LIMIT = Option("Prompts of each task.", PROMPTS, least=1, largest=LARGEST_COUNT)
EXCERPT = Option(
    "Tokens of a plain text's passage to start from. Default: 64.", PROMPTS, least=1, largest=LARGEST_COUNT
)
CHAT_TEMPLATE = Option(
    "Send plain prompts through the tokenizer's chat template too, or nothing. Default: messages and turns.",
    PROMPTS,
    flag="--chat-template/--no-chat-template",
)
SEED = Option("Fixes what is drawn at random.", MEASURING, least=0, largest=LARGEST_SEED)
NEW_TOKENS = Option("Most tokens of the new text.", SAMPLING, least=1, largest=LARGEST_COUNT)
JSON = Option("Print one JSON object and nothing else.", OUTPUT, flag="--json")
JSON_LINES = JSON.but(help="Print JSON lines and nothing else.")
QUIET = Option("Print the new text and nothing else.", OUTPUT, flag="--quiet -q")
RESULTS_ALONE = QUIET.but(help="Print the results and nothing else.")
FILE_TO_READ = Option("A file to read.", metavar="FILE", check=to_read)
FOLDER = Option("A folder to fill.", metavar="FOLDER", check=folder_to_write)


def replica_range(said: str | None) -> tuple[int, int]:
    """Return how many copies of a model are meant, at least and at most.

    Raises:
        InvalidParameter: it is neither a number nor a range of numbers.
    """
    least, colon, most = ("1" if said is None else said).partition(":")
    numbers = [int(one) if one.isdecimal() and len(one) < 6 else 0 for one in (least, most if colon else least)]
    if not 1 <= numbers[0] <= numbers[1]:
        raise InvalidParameter(
            f"--replicas must be a number such as 2, or a range of such as 1:4, from 1 on, but is {shown(said)}."
        )
    return numbers[0], numbers[1]


def check_ray(*, ray: bool, address: str | None, replicas: str | None, threads: int | None = None) -> tuple[int, int]:
    """Check what is said of a cluster; return how many copies of the model there are at least and at most.

    Raises:
        InvalidParameter: something is said of a cluster that is not used, or no such numbers.
    """
    for name, value in {"--address": address, "--replicas": replicas, "--threads": threads}.items():
        if value is not None and not ray:
            raise InvalidParameter(f"{name} is about a Ray cluster: give --ray too, or leave it out.")
    return replica_range(replicas)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The models, and where they are kept in which precision."""

    target: str | None = TARGET.usually(None)
    draft: str | None = DRAFT.usually(None)
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    weights: str | None = WEIGHTS.usually(None)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A Ray cluster in which something is measured."""

    ray: bool = RAY.but(
        help="Share the prompts among copies of the models in a Ray cluster (docs/scaling.md)."
    ).usually(False)
    address: str | None = ADDRESS.usually(None)
    replicas: str | None = REPLICAS.usually(None)
    threads: int | None = COPY_THREADS.usually(None)

    def __post_init__(self) -> None:
        check_ray(ray=self.ray, address=self.address, replicas=self.replicas, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """Who drafts, how drafts are drawn and verified, and in which trees."""

    drafter: str | None = DRAFTER.usually(None)
    verifier: str = VERIFIER.usually("auto")
    scheme: str | None = SCHEME.usually(None)
    bottom_up: bool = BOTTOM_UP.usually(False)
    tree: str | None = TREE.usually(None)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Sampling, DraftingOptions, ModelOptions):
    """How a text is drafted and sampled, and by which models."""
