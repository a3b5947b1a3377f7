#include "layer.h"

namespace te {

namespace {

enum Step : int64_t { kProject, kRotate, kAttend, kMerge, kOutput, kNorm, kGate, kDown };

}  // namespace

int64_t LayerPhases::units(int64_t phase, int threads) const {
  const AttentionShape& s = shape.attention;
  switch (phase) {
    case kProject: return tiles_of(w.qkv());
    case kRotate: return pass.rows * (s.heads + s.kv_heads);
    case kAttend: return AttentionUnits(s, pass, threads).count;
    case kMerge: return in_chunks(pass) ? pass.rows * s.heads : 0;
    case kOutput: return w.o.weight.tiles;
    case kNorm: return pass.rows;
    case kGate: return w.gate.weight.n / kBlock;
    default: return w.down.weight.tiles;
  }
}

void LayerPhases::work(int64_t phase, const Kernels& kernels, const Part& part) const {
  const Worker worker(kernels, space, part);
  const int64_t rows = pass.rows;
  const Activations a = space.first(rows), b = space.second(rows);
  const Weight& gate = w.gate.weight;
  const AttentionJob job{shape.attention, space.qkv.data(), shape.qkv_width(), kv.keys, kv.values, pass.reads, b, nullptr};
  float *q = space.qkv.data(), *k = q + shape.query_width(), *v = k + shape.kv_width();
  switch (phase) {
    case kProject:
      return worker.project({{&w.q.weight, w.q_bias.data(), q},
                             {&w.k.weight, w.k_bias.data(), k},
                             {&w.v.weight, w.v_bias.data(), v}},
                            a, rows, shape.qkv_width(), worker.beginning({&w.o.weight}));
    case kRotate: return worker.rotate_and_store(shape, w, rope, pass, kv);
    case kAttend: return worker.attend(job, pass, w.o.weight);
    case kMerge: return worker.merge(job, pass);
    case kOutput:
      return worker.project_add(w.o.weight, b, rows, w.o_bias.data(), shape.residual_scale, x,
                                {&gate, Share(gate.n / kBlock, part.thread, part.threads).begin * 2});
    case kNorm:
      for (int64_t r = part.begin; r < part.end; ++r) worker.norm(x, r, shape.hidden, w.mlp_norm, shape.eps, a);
      return;
    case kGate: return worker.gated(gate, w.up.weight, a, rows, b, worker.beginning({&w.down.weight}));
    default:
      return worker.project_add(w.down.weight, b, rows, nullptr, shape.residual_scale, x, worker.beginning(after));
  }
}

}  // namespace te
