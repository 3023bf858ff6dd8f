"""What a comparison found: a table for the terminal, a self-contained page, and the figures as files."""

from fairwind.report.page import write_report
from fairwind.report.table import summary_table

__all__ = ["summary_table", "write_report"]
