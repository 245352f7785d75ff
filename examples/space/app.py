"""The demo app as a Space of the Hub, or on your machine: python app.py."""

from lexperts.app import launch

if __name__ == "__main__":
    launch(max_characters=10_000)
