"""`polydraft generate`: which options belong to a file of prompts, and which to one prompt."""

from dataclasses import replace

from polydraft.cli.generation.grammar_options import given_grammar
from polydraft.cli.generation.prompt_file import run_file
from polydraft.cli.one_text import given_prompt, run_generate
from polydraft.errors import InvalidParameter
from polydraft.options.commands.generate_options import GenerateOptions


def run(options: GenerateOptions) -> int:
    """Continue a prompt, or all of a file; return the exit code."""
    check_files(options)
    options = replace(options, prompt=given_prompt(options.prompt))
    grammar = given_grammar(options.json_schema, options.regex, options.grammar, compact=options.compact)
    return (run_generate if options.input_file is None else run_file)(options, grammar)


def check_files(options: GenerateOptions) -> None:
    """Check that the options are about one prompt, or about a file and where its texts go.

    Raises:
        InvalidParameter: options that do not go together.
    """
    if options.input_file is None:
        of_files = {"--output": options.output, "--batch-size": options.batch_size}
        lonely = [name for name, value in of_files.items() if value is not None]
        if lonely:
            raise InvalidParameter(f"{lonely[0]} needs --input: a file of prompts.")
        if options.prompt is None:
            raise InvalidParameter("Give a prompt, or --input with a file of prompts.")
        return
    if options.prompt is not None:
        raise InvalidParameter("Give either a prompt or --input, not both.")
    if options.compare:
        raise InvalidParameter("--compare is for one prompt; `polydraft bench --prompts FILE` compares on a file.")
    if options.output is None:
        raise InvalidParameter("--input needs --output: the file that the texts are written to.")
