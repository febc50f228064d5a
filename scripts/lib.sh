# Sourced by the other scripts: one environment in .venv, made from the lock file, reused while that is unchanged.

environment() {
    local python=${PYTHON:-python3} stamp
    stamp=$(cat requirements.lock pyproject.toml scripts/lib.sh | cksum)
    if [ ! -x .venv/bin/python ] || [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
        echo "making .venv ..." >&2
        "$python" -m venv --clear .venv
        .venv/bin/python -m pip install --quiet --require-hashes --requirement requirements.lock
        .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
        echo "$stamp" > .venv/stamp
    fi
    export PATH="$PWD/.venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
}
