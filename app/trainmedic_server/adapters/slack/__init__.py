"""Questions in Slack, with buttons by which people answer them: by Socket Mode, a connection that this server opens.

``web_api`` calls Slack, ``socket_mode`` is told what people press, ``people`` knows who they are, ``question_blocks``
writes a question, ``questions`` keeps the messages as the questions are, and ``button_clicks`` makes orders of buttons.
Imported only where Slack is set, because of the extra that it needs.
"""
