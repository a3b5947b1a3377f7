// Which tiles may hold the best token of a row: what the first plane of the output matrix says, and its bounds.
//
// Three phases of a pass. All tiles are looked at, through the first plane, which gives an upper bound of what each holds for a
// row. Then the best tile of each row, as it seems, is computed in full, whose largest logit is the floor. At last the tiles
// whose upper bound reaches it are computed in full. No logit of the others can be the largest, nor equal to it, so that the
// best token is the one that all logits give.
#pragma once

#include <atomic>
#include <vector>

#include "worker.h"

namespace te {

class Screen {
 public:
  Screen(int64_t tiles, const Kernels& kernels, int threads);

  // Before a pass of so many rows.
  void begin(int64_t rows);
  // After a row was quantised: its norm.
  void enter(const Weight& output, const Activations& a, int64_t row);
  // Whether to look at the first plane: there is one, the rows are few, no sum can overflow, and it has been of use lately.
  bool serves(const Weight& output, int64_t rows) const;

  // Units are tiles.
  void look(const Worker& worker, const Weight& output, const Activations& a, const Part& part);
  // Units are rows.
  void find_floors(const Worker& worker, const Weight& output, const Activations& a, const Part& part, Peak* peaks);
  // Units are tiles.
  void compute(const Worker& worker, const Weight& output, const Activations& a, const Part& part, Peak* peaks);

 private:
  // Rows [begin, end) among which all are whose best token may lie in the tile.
  Share rows_of(int64_t tile, int64_t rows) const;

  const int64_t tiles_, most_rows_;
  std::vector<Buffer<Contender>> best_;  // per thread: [most rows]
  Vector uppers_;                        // [tiles][most rows]
  Vector norms_, floors_;                // [most rows]
  std::atomic<int64_t> computed_{0};     // tiles in full in this pass
  int64_t passes_off_ = 0;               // passes to come for which the first plane is left alone
};

}  // namespace te
