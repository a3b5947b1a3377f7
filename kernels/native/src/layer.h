// One decoder layer, of the target or of the draft head, as the phases of a pass.
#pragma once

#include "worker.h"

namespace te {

// The phases of a layer after its input norm: space.first() holds the normalised input, x the residual stream.
struct LayerPhases {
  static constexpr int64_t kCount = 8;

  const LayerShape& shape;
  const LayerWeights& w;
  const RopeTable& rope;
  const Pass& pass;
  KeyValueRows kv;
  float* x;
  Workspace& space;
  Matrices after;  // what is read next

  int64_t units(int64_t phase, int threads) const;
  void work(int64_t phase, const Kernels& kernels, const Part& part) const;
};

}  // namespace te
