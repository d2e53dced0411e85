"""SGLang through its plugin framework (entry point group `sglang.srt.plugins`); docs/engines.md says what is recorded."""
