// SPDX-License-Identifier: Apache-2.0
// Launching the captured graph of one layer.
#include <tvm/ffi/extra/c_env_api.h>

#include "context.h"
#include "kernels.h"

namespace msa_icp {

// launch_graph(graph, staging, index_q): on torch's current stream, copies the query into the buffer that a captured
// graph reads, unless it is that, and launches the graph.
MSA_EXPORT __tvm_ffi_launch_graph(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  Call call(args, count);
  auto* graph = reinterpret_cast<CUgraphExec>(static_cast<intptr_t>(call.integer("graph", 1, INT64_MAX)));
  call.require_cuda();
  const Tensor staging = call.tensor("staging", Type::kE4M3, 3), query = call.tensor("index_q", Type::kE4M3, 3);
  if (call.ok())
    call.expect_shape(query, "[tokens, heads, head dim", staging.size(0), staging.size(1), staging.size(2));
  call.expect_contiguous(query);
  const Device* device = call.ok() ? ready_device(call) : nullptr;
  if (device == nullptr) return call.finish();
  const Driver* d = require_driver(call);
  ContextScope scope(d, device->context);
  CUstream stream = TVMFFIEnvGetStream(kDLCUDA, call.device().device_id);
  const auto to = reinterpret_cast<CUdeviceptr>(staging.data<char>());
  const auto from = reinterpret_cast<CUdeviceptr>(query.data<char>());
  const size_t bytes = static_cast<size_t>(staging.size(0) * staging.size(1) * staging.size(2));
  if (to == from || check(call, d, d->cuMemcpyDtoDAsync(to, from, bytes, stream), "copying the query")) {
    check(call, d, d->cuGraphLaunch(graph, stream), "launching a layer's graph");
  }
  return call.finish();
}

}  // namespace msa_icp
