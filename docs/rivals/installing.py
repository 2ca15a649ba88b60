"""Install the tools that `lab/rivals.py` measures, each in a folder of its own, and make their models.

What is there already stays. What a step printed is kept in the tool's folder, in `log`.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "transformers==4.57.6", TORCH)
ONNX = ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx-ir", TORCH, "transformers==5.23.0")
LLAMA = "llama-cpp-python==0.3.36"
"""Its source holds llama.cpp."""
READER = "sentencepiece==0.2.1"
"""What llama.cpp's script of conversion imports beside what polydraft needs."""
CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
)


class Missing(Exception):
    """A tool cannot be measured; why, in a sentence."""


@dataclass(frozen=True)
class Place:
    """Where a tool lies, and the model that it is to run."""

    folder: Path
    model: Path

    def run(self, what: str, *command: object) -> None:
        """Run a step of the installation.

        Raises:
            Missing: it failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"{self.folder.name}: {what}", flush=True)
        with (self.folder / "log").open("a") as log:
            done = subprocess.run([*map(str, command)], stdout=log, stderr=log, cwd=self.folder, env=surroundings(2))
        if done.returncode:
            raise Missing(f"could not {what}; exit code {done.returncode}")

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a file or folder of the tool, made now if it is not there; it takes its name once it is whole."""
        path, part = self.folder / name, self.folder / f"{name}.part"
        if not path.exists():
            make(part)
            part.rename(path)
        return path

    def environment(self, packages: Sequence[str], without: Sequence[str] = ()) -> Path:
        """Return the Python of an environment with these packages, and without some that come along."""
        python, ready = self.folder / "venv" / "bin" / "python", self.folder / "venv" / "ready"
        if not ready.exists():
            self.run("make an environment", sys.executable, "-m", "venv", self.folder / "venv")
            self.run(f"install {packages[0]}", python, "-m", "pip", "install", "-q", *packages)
            if without:
                self.run(f"remove {without[0]}", python, "-m", "pip", "uninstall", "-q", "-y", *without)
            ready.touch()
        return python


def surroundings(threads: int) -> dict[str, str]:
    """Return the environment of a tool that is not polydraft, which must not find polydraft."""
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own


def as_they_are(place: Place, weights: str) -> tuple[Path, Path]:
    """Return this Python and the model, which need nothing."""
    return Path(sys.executable), place.model


def openvino(place: Place, weights: str) -> tuple[Path, Path]:
    """Return OpenVINO's Python and model; bfloat16 is arithmetic on the float32 model."""
    python = place.environment(OPENVINO, without=["torchvision"])  # transformers would import it, and fail
    form = {"bfloat16": "float32"}.get(weights, weights)
    older = place.made("transformers4", lambda part: write_older(place.model, part))
    command = (
        python.with_name("optimum-cli"),
        "export",
        "openvino",
        "-m",
        older,
        "--task",
        "text-generation-with-past",
    )
    bits = (
        "--weight-format",
        form.replace("float", "fp"),
        *(("--group-size", "64", "--ratio", "1.0") * (form == "int4")),
    )
    made = place.made(form, lambda part: place.run(f"export in {form}", *command, *bits, part))
    return python, made


def write_older(model: Path, folder: Path) -> None:
    """Write a model as transformers 4 reads it, which would take the usual rotation if it stood where it stands now."""
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    for path in model.iterdir():
        if path.name == "config.json":
            (folder / path.name).write_text(json.dumps(config, indent=1))
        elif not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)


def onnxruntime(place: Place, weights: str) -> tuple[Path, Path]:
    """Return onnxruntime's Python and model."""
    python = place.environment(ONNX)
    form = weights.replace("float", "fp")
    command = (python, "-m", "onnxruntime_genai.models.builder", "-m", "x", "-i", place.model, "-p", form, "-e", "cpu")
    four = ("--extra_options", "int4_accuracy_level=4", "int4_block_size=32") * (weights == "int4")
    cache = place.folder / "cache"
    make = lambda part: place.run(f"build in {form}", *command, "-c", cache, "-o", part, *four)  # noqa: E731
    return python, place.made(weights, make)


def llama_cpp(place: Place, weights: str) -> tuple[Path, Path]:
    """Return this Python and a file of weights beside the programs of llama.cpp, which are built from source."""
    source = place.made("source", lambda part: unpack(place, part))
    build = place.folder / "build"
    if not (build / "ready").exists():
        place.run("configure the build", "cmake", "-S", source, "-B", build, *CMAKE)
        place.run("build", "cmake", "--build", build, "--target", "llama-quantize", "llama-server")
        (build / "ready").touch()
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target")
    extra = place.made("extra", lambda part: place.run(f"install {READER}", *pip, part, READER))
    script = source / "convert_hf_to_gguf.py"
    convert = ("env", f"PYTHONPATH={extra}", sys.executable, script, place.model, "--outtype", "f32", "--outfile")
    whole = place.made("F32.gguf", lambda part: place.run("convert the model", *convert, part))
    quantise = (build / "bin" / "llama-quantize", whole)
    make = lambda part: place.run(f"make {weights}", *quantise, part, weights)  # noqa: E731
    return Path(sys.executable), place.made(f"{weights}.gguf", make)


def unpack(place: Place, folder: Path) -> None:
    """Bring the source of llama.cpp."""
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:")
    place.run(f"download {LLAMA}", *pip, "-d", place.folder, LLAMA)
    with tarfile.open(next(place.folder.glob("llama_cpp_python-*.tar.gz"))) as packed:
        packed.extractall(place.folder, filter="data")
    (next(place.folder.glob("llama_cpp_python-*/vendor")) / "llama.cpp").rename(folder)


Install = Callable[[Place, str], tuple[Path, Path]]
INSTALL: Mapping[str, Install] = {
    "polydraft": as_they_are,
    "transformers": as_they_are,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "llama.cpp": llama_cpp,
}
"""How to get a tool's Python and its model, for each kind of weights; what fails raises `Missing`."""
WEIGHTS = {
    "polydraft": ("float32", "bfloat16", "int8", "int4"),
    "transformers": ("float32", "bfloat16"),
    "openvino": ("float32", "bfloat16", "int8", "int4"),
    "onnxruntime": ("float32", "int4"),
    "llama.cpp": ("F32", "BF16", "Q8_0", "Q4_1", "Q4_0"),
}
