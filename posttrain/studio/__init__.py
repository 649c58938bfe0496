"""`posttrain studio`: a local web app that shows run directories. It reads runs through `runs`, and runs models through
`serve`."""
