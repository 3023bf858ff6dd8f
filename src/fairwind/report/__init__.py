"""What a comparison or a study found: tables for the terminal, self-contained pages, figures as files."""

from fairwind.report.labels import data_table, write_labels
from fairwind.report.page import write_report
from fairwind.report.study import write_study
from fairwind.report.table import summary_table
from fairwind.report.theory import write_theory

__all__ = ["data_table", "summary_table", "write_labels", "write_report", "write_study", "write_theory"]
