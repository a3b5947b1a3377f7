// Fills a matrix from rows of floats or of GGUF blocks.
#pragma once

#include "weights.h"
#include "team.h"

namespace te {

// `to` is allocated, its tiles are shared out between the team's threads. A row of `data` takes `row_bytes`: floats, or blocks in
// GGUF's layout of the matrix's width.
void pack_matrix(Team& team, Matrix& to, bool is_gguf, const uint8_t* data, int64_t row_bytes);

}  // namespace te
