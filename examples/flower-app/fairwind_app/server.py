"""The server's side."""

from fairwind.flower import server_app
from fairwind_app.task import task

app = server_app(task)
