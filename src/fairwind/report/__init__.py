"""What a comparison found: a table for the terminal, a self-contained page, and the figures as files."""

from fairwind.report.labels import data_table, write_labels
from fairwind.report.page import write_report
from fairwind.report.study import write_study
from fairwind.report.table import summary_table


__all__ = ["data_table", "summary_table", "write_labels", "write_report", "write_study"]
