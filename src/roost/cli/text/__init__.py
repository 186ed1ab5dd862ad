"""Answers as text for people: values in, styled text out."""
