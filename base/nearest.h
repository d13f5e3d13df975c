// The name that somebody may have meant who misspelt it.
//
// Pure; any thread.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace treadle {

// Of `names` the one with the fewest letters to insert, drop or replace (Levenshtein), the first of
// several; empty if a third of the letters or more are others.
std::string_view NearestName(std::string_view name, std::span<const std::string_view> names);

// "; did you mean 'NAME'?", or nothing.
std::string DidYouMean(std::string_view name, std::span<const std::string_view> names);

}  // namespace treadle
