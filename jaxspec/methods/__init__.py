"""Decoding methods: how tokens are proposed and verified."""
