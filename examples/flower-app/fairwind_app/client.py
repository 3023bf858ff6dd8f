"""The client's side."""

from fairwind.flower import client_app
from fairwind_app.task import task

app = client_app(task)
