cd /tmp/b/$1; shift
PYTHONPATH=$PWD .venv/bin/python -W ignore "$@"
