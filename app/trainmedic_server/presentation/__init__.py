"""How runs, questions and times read for people, whichever surface shows them. Pure.

The functions take a domain value or the API's document of it, and return plain text, or a `sentences.Sentence` where a
surface lays out a part by itself: the console links a run, the command line shortens its ID. Callers: the command
line, the console, Slack's messages and the messages of ``engine.message_texts``. Not here: markup and escaping, which
belong to each surface.
"""
