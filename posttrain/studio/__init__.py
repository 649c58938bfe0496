"""`posttrain studio`: one local web app over run directories. It reads runs through `runs`, and asks models through `serve`."""
