// The name that somebody may have meant who misspelt it.
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace treadle {

// How many letters have to be inserted, dropped or replaced (Levenshtein).
size_t EditDistance(std::string_view a, std::string_view b);

// The nearest of `names`, the first of several; empty if a third of the letters or more are others.
std::string_view NearestName(std::string_view name, std::span<const std::string_view> names);

// "; did you mean 'NAME'?", or nothing.
std::string DidYouMean(std::string_view name, std::span<const std::string_view> names);

}  // namespace treadle
