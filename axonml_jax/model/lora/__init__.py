"""Finetuning by adapters of low rank."""
