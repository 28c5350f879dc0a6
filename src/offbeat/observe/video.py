"""Videos of episodes: GIF by Pillow, MP4 by ffmpeg. Written whole or not at all."""

from __future__ import annotations

import contextlib
import importlib
import os
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError, EnvError, OffbeatError

if TYPE_CHECKING:
    from PIL.Image import Image

Frame = NDArray[np.uint8]
"""A picture ``[height, width, 3]``."""

MAX_FRAMES = {".gif": 600, ".mp4": 20_000}
"""Longest video by suffix. Viewers hold a whole GIF in memory, and so does the writer."""
MAX_FPS = 50
"""More than this no viewer shows of a GIF, whose times are hundredths of a second."""
_NEEDS = {".gif": "PIL.Image", ".mp4": "imageio_ffmpeg"}
_HOLD_S = 1.5
_NUM_SAMPLES = 12
_INSTALL = 'pip install "offbeat[video]"'


def missing_package(path: Path) -> str | None:
    """Return what has to be installed before this video can be written; None when nothing is missing."""
    try:
        module = importlib.import_module(_NEEDS[path.suffix])
        if path.suffix == ".mp4":
            module.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        return f"a {path.suffix[1:].upper()} cannot be made here ({error}): {_INSTALL}"
    return None


def check_place(path: Path) -> None:
    """Refuse a file that could not be written in the end."""
    if path.suffix not in MAX_FRAMES:
        raise ConfigError(f"{path} is no video: give a name that ends in {' or '.join(MAX_FRAMES)}")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give the name of a file in it")
    temporary = _beside(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another file") from error


class VideoWriter:
    """A writer of a video, frame by frame. Frames past ``MAX_FRAMES`` are left out: see ``is_cut``.

    Example: ``video = VideoWriter(Path("play.gif"), fps=6); video.add(env.render); video.close()``.
    """

    def __init__(self, path: Path, fps: float) -> None:
        check_place(path)
        if (reason := missing_package(path)) is not None:
            raise ConfigError(reason)
        self.path = path
        self.fps = fps
        self.num_frames = 0
        self.is_cut = False
        self._shape: tuple[int, ...] = ()
        self._temporary = _beside(path)
        self._writer: _Writer = (_Gif if path.suffix == ".gif" else _Mp4)(self._temporary, fps)

    def add(self, draw: Callable[[], object]) -> None:
        """Append the picture that is drawn, ``[height, width, 3]`` bytes, all of one size.

        Nothing is drawn for a video that is full.
        """
        if self.num_frames >= MAX_FRAMES[self.path.suffix]:
            self.is_cut = True
            return
        picture = _picture(draw())
        self._shape = self._shape or picture.shape
        if picture.shape != self._shape:
            raise EnvError(
                f"render() changed its pictures from {self._shape} to {picture.shape}; keep one size"
            )
        with _told_as(self.path):
            self._writer.add(picture)
        self.num_frames += 1

    def hold(self) -> None:
        """Let the last picture stand for a moment: something has ended."""
        if self.num_frames and not self.is_cut:
            with _told_as(self.path):
                self._writer.hold()

    def close(self) -> Path | None:
        """Write the file and return its path; None, and no file, when there was no frame."""
        if not self.num_frames:
            return None
        try:
            with _told_as(self.path):
                self._writer.finish()
                self._temporary.replace(self.path)
        finally:
            self._temporary.unlink(missing_ok=True)
        return self.path

    def discard(self) -> None:
        """Leave nothing behind; after ``close`` this does nothing."""
        self._writer.abandon()
        self._temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")


def _picture(frame: object) -> Frame:
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return frame
    found = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise EnvError(f"render() gave {found} for rgb_array, a picture is uint8 [height, width, 3]; correct it")


@contextlib.contextmanager
def _told_as(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise OffbeatError(
            f"{path} cannot be written: {error}. Free disk space or choose another file"
        ) from error


class _Writer(Protocol):
    def add(self, frame: Frame) -> None: ...

    def hold(self) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class _Gif:
    """Keeps the frames, packed, until all are there: the colours are chosen for all of them together.

    With colours of its own each frame would flicker, and hold many pixels that differ from the one before.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self._path = path
        self._frame_ms = max(round(1000 / fps), 1000 // MAX_FPS)
        self._size = (0, 0)
        self._packed: list[bytes] = []
        self._times_ms: list[int] = []

    def add(self, frame: Frame) -> None:
        self._size = (frame.shape[1], frame.shape[0])
        self._packed.append(zlib.compress(frame.tobytes(), level=1))
        self._times_ms.append(self._frame_ms)

    def hold(self) -> None:
        self._times_ms[-1] = round(_HOLD_S * 1000)

    def finish(self) -> None:
        palette = self._palette()
        first, *others = (self._coloured(packed, palette) for packed in self._packed)
        times = self._times_ms
        first.save(self._path, "GIF", save_all=True, append_images=others, duration=times, loop=0, disposal=1)

    def abandon(self) -> None:
        self._packed.clear()

    def _image(self, packed: bytes) -> Image:
        from PIL import Image

        return Image.frombytes("RGB", self._size, zlib.decompress(packed))

    def _palette(self) -> Image:
        """256 colours for the whole video, chosen from some of its frames, the first and last among them."""
        from PIL import Image

        chosen = np.unique(np.linspace(0, len(self._packed) - 1, _NUM_SAMPLES).round().astype(int))
        width, height = self._size
        strip = Image.new("RGB", (width, height * len(chosen)))
        for row, index in enumerate(chosen):
            strip.paste(self._image(self._packed[index]), (0, row * height))
        return strip.quantize(256, kmeans=1)

    def _coloured(self, packed: bytes, palette: Image) -> Image:
        from PIL import Image

        # Without dithering, whose grain differs from frame to frame.
        return self._image(packed).quantize(palette=palette, dither=Image.Dither.NONE)


class _Mp4:
    """Hands each frame to ffmpeg at once."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path = path
        self._fps = fps
        self._last: Frame | None = None
        self._ffmpeg: Generator[None, object, None] | None = None

    def add(self, frame: Frame) -> None:
        if self._ffmpeg is None:
            self._ffmpeg = self._start(frame)
        self._last = frame.copy()
        self._ffmpeg.send(np.ascontiguousarray(frame))

    def hold(self) -> None:
        if self._last is not None and self._ffmpeg is not None:
            for _ in range(round(_HOLD_S * self._fps)):
                self._ffmpeg.send(self._last)

    def finish(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        if self._ffmpeg is not None:
            self._ffmpeg.close()
            self._ffmpeg = None

    def _start(self, frame: Frame) -> Generator[None, object, None]:
        import imageio_ffmpeg

        height, width, _ = frame.shape
        # Halves of the colour planes: sides have to be even numbers, and no more than that.
        ffmpeg: Generator[None, object, None] = imageio_ffmpeg.write_frames(
            str(self._path),
            (width, height),
            fps=self._fps,
            quality=8,
            macro_block_size=2,
            ffmpeg_log_level="error",
        )
        ffmpeg.send(None)
        return ffmpeg
