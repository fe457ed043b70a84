"""Evaluation tasks: one measurement each, with its section of the report.

To add a task, write a module here with a class `Task` like the existing ones, and add the module's
name to `EvaluationTaskName` in `infini_model.config.evaluation`.
"""
