#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the demo, also on a fresh machine. It needs Python 3.10 or newer and a C++ compiler. Arguments go to the demo.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare build
exec python -m flashinfer_msa demo "$@"
