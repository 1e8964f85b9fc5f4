"""How other projects' models and compilers reach Codetta."""
