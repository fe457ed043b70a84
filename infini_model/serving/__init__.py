"""Answers for many clients at once, from states that are kept between their requests."""
