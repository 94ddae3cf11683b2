"""The Hadoop YARN resource manager of dl2d, through the Services REST interface; see docs/yarn.md."""
