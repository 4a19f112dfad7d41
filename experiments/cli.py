"""What every experiment's command line has in common: parsing, one-line errors, exit codes."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from absl import flags, logging

from experiments.json_lines import check_writable

OK, FAILED, WRONG_USE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141


class HelpRequestedError(Exception):
    """The user asked what the flags are: the message."""


class UsageError(Exception):
    """What the user asked for cannot be done; the message is for them, without a traceback."""


def set_up_process() -> None:
    """Makes logging and standard output fit a command line; call it under `__main__` only.

    Library logging goes to standard error from the level of absl's --verbosity on, by default
    warnings. A character that standard output's encoding lacks is written as an escape sequence.
    """
    logging.use_absl_handler()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def parse_flags(argv: Sequence[str], flag_values: flags.FlagValues) -> None:
    """Sets the flags from `argv`, whose first item is the program.

    With `--num_processes`, JAX is told to leave memory to the other processes.

    Raises:
      HelpRequestedError: `--help`, where that is no flag of the program's own.
      UsageError: an unknown flag, a value that it does not take, or an argument that is no flag.
    """
    if "--help" in argv[1:] and "help" not in flag_values:
        raise HelpRequestedError(flag_values.get_help(include_special_flags=False))
    try:
        rest = flag_values(list(argv))
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if rest[1:]:
        raise UsageError(f"every argument must be a flag; got {rest[1]!r}. See --help.")
    if "num_processes" in flag_values and int(str(flag_values["num_processes"].value)) > 1:
        # Before JAX starts: by default it takes most of a GPU's memory for one process.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns the refusals of the library and of the file system into `UsageError`.

    For the part of a program that checks what it was given and does no work yet: later such an
    exception is a bug, and its traceback is wanted.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(explain_os_error(error)) from error
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error


def explain_os_error(error: OSError) -> str:
    """The file and what is wrong with it, without an error number."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def exit_status(command: Callable[[], int]) -> int:
    """The status that `command` returns, or the one of what stopped it.

    2 after a `UsageError`, which is one line on standard error; 130 after Ctrl-C; 141 where nobody
    reads standard output any more. Asked for help, it prints the docstring of the module that
    `command` is from, then the flags.
    """
    try:
        status = command()
        sys.stdout.flush()
    except HelpRequestedError as help_text:
        print(sys.modules[command.__module__].__doc__, help_text, sep="\n")
        return OK
    except UsageError as error:
        say(f"error: {error}")
        return WRONG_USE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    return status


def run_experiment[Config](
    argv: Sequence[str],
    flag_values: flags.FlagValues,
    make_config: Callable[..., Config],
    run: Callable[[Config], object],
) -> int:
    """The exit status of a command line whose flags are settings of an experiment.

    Settings that `make_config` refuses, and an `output` that cannot be written, are wrong use, told
    before `run` does any work. Lists become tuples.
    """

    def command() -> int:
        parse_flags(argv, flag_values)
        given = {name: flag_values[name].value for name in flag_values}
        settings = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
        with usage_errors():
            config = make_config(**settings)
            if given["output"] is not None:
                check_writable(str(given["output"]))
        run(config)
        return OK

    command.__module__ = run.__module__  # whose docstring is the help
    return exit_status(command)


def say(message: str) -> None:
    """Writes one line to standard error."""
    print(" ".join(message.splitlines()), file=sys.stderr, flush=True)
