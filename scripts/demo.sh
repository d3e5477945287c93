#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the demo, on a fresh machine too: needs Python 3.10 or newer and a C++ compiler. Arguments go to the demo.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare build
exec python -m flashinfer_msa demo "$@"
