"""TensorBoard: a folder of event files for each run."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from fairwind.tracking import Tracked

ID = "id"  # the file that says whose folder it is


class TensorBoard:
    """Event files in FOLDER/comparison/algorithm/seed; the report page lies in FOLDER/comparison."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.writers: dict[str, SummaryWriter] = {}

    def start(self, tracked: Tracked) -> None:
        self.place = self._place(tracked)
        table = "\n".join(["| setting | value |", "|---|---|"])
        table += "".join(f"\n| {name} | {value} |" for name, value in tracked.settings.items())
        self._wait()
        for run in tracked.runs:
            label, _, seed = run.rpartition("/")
            # What is there of an earlier process is void from step 0 on: the rounds it told come again.
            place = self.place / label.replace("/", "-") / seed
            self.writers[run] = SummaryWriter(str(place), purge_step=0)
            self.writers[run].add_text("settings", table, 0)

    def _place(self, tracked: Tracked) -> Path:
        """The comparison's folder; where its name is another's, with a number."""
        number = 1
        while True:
            place = self.folder / (tracked.name if number == 1 else f"{tracked.name}-{number}")
            if not place.exists():
                place.mkdir(parents=True)
                (place / ID).write_text(tracked.id)
            if (place / ID).exists() and (place / ID).read_text() == tracked.id:
                return place
            number += 1

    def _wait(self) -> None:
        """Waits until a new file's name sorts after those of an earlier process.

        TensorBoard reads files in the order of their names: the second in which they were begun, the
        host, the process's number. Of two processes in one second, the later may have the lower number.
        """
        seconds = [int(file.name.split(".")[3]) for file in self.place.glob("*/*/events.out.tfevents.*")]
        time.sleep(min(max(max(seconds, default=0) + 1 - time.time(), 0), 1))

    def log(self, run: str, round: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writers[run].add_scalar(name, value, round)
        self.writers[run].flush()

    def finish(self, *, complete: bool, page: Path | None) -> None:
        if page is not None:
            shutil.copyfile(page, self.place / page.name)
        for writer in self.writers.values():
            writer.close()
