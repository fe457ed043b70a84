"""Evaluation tasks: one measurement each, with its section of the report.

To add a task, write a module here with a class `Task` like those that stand beside it, and name the
module in `EvaluationTaskName` of `infini_model.config.evaluation`.
"""
