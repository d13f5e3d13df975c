// What a worker tells about the machine that it runs on. Thread safety: stateless.
#pragma once

#include <cstdint>
#include <string>

namespace treadle {

// Bytes that the system can give without swapping.
uint64_t AvailableMemory();

// The same for all processes of one machine.
std::string MachineId();

}  // namespace treadle
