// The model that requests of fuzz targets are for: a few tokens, a chat template, little of
// everything.
//
// Thread safety: made by the first call, then constant.
#pragma once

#include "server/session/served_model.h"

namespace treadle {

const ServedModel& FuzzedModel();

}  // namespace treadle
