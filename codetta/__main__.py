"""python -m codetta"""

from codetta.cli import app

if __name__ == "__main__":
    app()
