"""Settings and flags of the cost profile."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from absl import flags

from codec_jax.attention import choose_implementation, stored_head_dim
from codec_jax.planning.profiles import ITEMSIZE
from codec_jax.planning.spec import TILE_ROWS

_INTEGERS = ("head_dims", "page_sizes", "group_sizes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to measure, or to fit again.

    Attributes:
      dtypes, head_dims, page_sizes: a profile for each of their combinations.
      group_sizes: rows of a request: the first has the whole grid, the others its axis of rows (the
        kernels see rows, not groups).
      num_runs: timed calls of each point.
      num_processes: that compile beside each other, see `experiments.processes`.
      points: points that were measured before, to be fitted again without a GPU, all combinations
        that are in them.
      output: the profile's file; by default the device's, in the package. Profiles in it for other
        combinations are kept.
      points_output: JSON lines file for the points; None writes none.
      smoke: a tiny grid on the XLA path, on any device, without times or a profile.
      commit: of the sources, where no repository travels along.

    Raises `ValueError` for settings that cannot be.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] = (128, 64, 256)
    page_sizes: tuple[int, ...] = (64,)
    group_sizes: tuple[int, ...] = (4, 1, 8)
    num_runs: int = 10
    num_processes: int = 1
    points: str | None = None
    output: str | None = None
    points_output: str | None = None
    smoke: bool = False
    commit: str | None = None

    def __post_init__(self) -> None:
        for name in ("dtypes", *_INTEGERS):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"`{name}` must be one or more different values; got {values}.")
        unknown = [name for name in self.dtypes if name not in ITEMSIZE]
        if unknown:
            raise ValueError(f"`dtypes` must be among {', '.join(ITEMSIZE)}; got {unknown[0]!r}.")
        for name in _INTEGERS:
            if min(getattr(self, name)) < 1:
                raise ValueError(f"`{name}` must be positive; got {min(getattr(self, name))}.")
        if max(self.group_sizes) > TILE_ROWS:
            raise ValueError(
                f"`group_sizes` must be at most a tile of {TILE_ROWS}; got {max(self.group_sizes)}."
            )
        for name in ("num_runs", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive; got {getattr(self, name)}.")
        if self.smoke and self.points is not None:
            raise ValueError("`points` must not be given with `smoke`, which fits nothing.")

    @property
    def signatures(self) -> list["Signature"]:
        """The combinations, the most wanted first."""
        return [
            Signature(dtype=dtype, head_dim=head_dim, page_size=page_size)
            for page_size in self.page_sizes
            for dtype in self.dtypes
            for head_dim in self.head_dims
        ]

    def check_device(self) -> None:
        """Raises unless the kernels run here with all combinations.

        Raises:
          ValueError: heads that would be stored padded.
          NotImplementedError: the kernels cannot do a combination on this device.
        """
        for signature in self.signatures:
            stored = stored_head_dim(signature.head_dim, implementation="mosaic_gpu")
            if stored != signature.head_dim:
                raise ValueError(
                    f"`head_dims` must be as stored, multiples of 64; got {signature.head_dim}."
                )
            shape = (1, signature.page_size, signature.head_dim)
            dtype = jnp.dtype(signature.dtype)
            choose_implementation(shape, dtype, 1, implementation="mosaic_gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """What a profile is for."""

    dtype: str
    head_dim: int
    page_size: int

    @property
    def page_bytes(self) -> int:
        """Keys and values of a page, of one KV head."""
        return 2 * self.page_size * self.head_dim * ITEMSIZE[self.dtype]

    def of(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows that are for it."""
        mine = dataclasses.asdict(self).items()
        return [row for row in rows if all(row[name] == value for name, value in mine)]


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags to `values`; their defaults are those of `ProfileConfig`."""
    default = ProfileConfig()

    def define(kind: Any, name: str, text: str) -> None:
        value = getattr(default, name)
        value = list(map(str, value)) if isinstance(value, tuple) else value
        kind(name, value, text, flag_values=values)

    define(flags.DEFINE_list, "dtypes", "of keys and values")
    define(flags.DEFINE_list, "head_dims", "as stored")
    define(flags.DEFINE_list, "page_sizes", "tokens of a page")
    define(flags.DEFINE_list, "group_sizes", "rows of a request")
    define(flags.DEFINE_integer, "num_runs", "timed calls of each point")
    define(flags.DEFINE_integer, "num_processes", "that compile side by side")
    define(flags.DEFINE_string, "points", "fit the points of this file again, on any device")
    define(flags.DEFINE_string, "output", "profile file; default: the device's, in the package")
    define(flags.DEFINE_string, "points_output", "JSON lines file for the measured points")
    define(flags.DEFINE_bool, "smoke", "a tiny grid on XLA, no times, any device")
    define(flags.DEFINE_string, "commit", "of a tree without its repository")


def config_from_flags(values: flags.FlagValues) -> ProfileConfig:
    """The settings that the parsed flags give; `ValueError` for settings that cannot be."""
    names = [field.name for field in dataclasses.fields(ProfileConfig)]
    settings: dict[str, Any] = {name: values[name].value for name in names}
    settings["dtypes"] = tuple(settings["dtypes"] or ())
    for name in _INTEGERS:
        settings[name] = tuple(_integer(name, text) for text in settings[name] or ())
    return ProfileConfig(**settings)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be integers; got {text!r}.") from None
