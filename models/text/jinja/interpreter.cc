#include "models/text/jinja/interpreter.h"

#include <algorithm>
#include <utility>

#include "models/text/jinja/library.h"

namespace treadle::jinja {
namespace {
using Kind = Node::Kind;
// A round of a loop makes its variables: that much more work than evaluating a node.
constexpr int64_t kStepsPerRound = 20;
}  // namespace

Interpreter::Interpreter(Context& context, const Named& variables) : context_(context), scopes_(1) {
  for (const auto& [name, value] : variables) scopes_[0].insert_or_assign(name, value);
}

std::string Interpreter::Render(const std::vector<NodePtr>& statements) {
  return Capture(statements);
}

std::string Interpreter::Capture(const std::vector<NodePtr>& body) {
  std::string captured;
  std::string* const outer = std::exchange(out_, &captured);
  RunBody(body);
  out_ = outer;
  return captured;
}

void Interpreter::Write(std::string_view text) {
  context_.Charge(text.size());
  *out_ += text;
}

Interpreter::Flow Interpreter::RunBody(const std::vector<NodePtr>& body) {
  for (const NodePtr& node : body) {
    const Flow flow = Run(*node);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::Run(const Node& node) {
  context_.line = node.line;
  context_.Enter();
  Flow flow = Flow::kNext;
  switch (node.kind) {
    case Kind::kText:
      Write(node.text);
      break;
    case Kind::kOutput:
      Write(Text(context_, Evaluate(*node.kids[0])));
      break;
    case Kind::kFor:
      flow = RunFor(node);
      break;
    case Kind::kIf:
      flow = RunIf(node);
      break;
    case Kind::kSet:
      Set(node, Evaluate(*node.kids[0]));
      break;
    case Kind::kBlockSet:
      Set(node, CaptureFiltered(node));
      break;
    case Kind::kFilterBlock:
      Write(Text(context_, CaptureFiltered(node)));
      break;
    case Kind::kMacro:
      RunMacro(node);
      break;
    case Kind::kGroup:
      scopes_.emplace_back();
      flow = RunBody(node.bodies[0]);
      scopes_.pop_back();
      break;
    case Kind::kBreak:
      flow = Flow::kBreak;
      break;
    case Kind::kContinue:
      flow = Flow::kContinue;
      break;
    default:
      TREADLE_CHECK(false);  // the parser makes no statements of other kinds
  }
  context_.Leave();
  return flow;
}

Interpreter::Flow Interpreter::RunIf(const Node& node) {
  for (size_t i = 0; i < node.kids.size(); ++i) {
    if (Evaluate(*node.kids[i]).Truth()) return RunBody(node.bodies[i]);
  }
  return RunBody(node.bodies.back());
}

// The items that the loop visits: those that its condition, if it has one, lets through.
List Interpreter::LoopItems(const Node& node) {
  List items = context_.Items(Evaluate(*node.kids[0]));
  if (!node.kids[1]) return items;
  List kept;
  for (Value& item : items) {
    scopes_.emplace_back();
    Assign(node.names, item);
    if (Evaluate(*node.kids[1]).Truth()) kept.push_back(std::move(item));
    scopes_.pop_back();
  }
  return kept;
}

Value Interpreter::LoopVariable(const List& items, size_t index) {
  const auto i = static_cast<int64_t>(index);
  const auto count = static_cast<int64_t>(items.size());
  const auto cycle = [i](Context& context, const Arguments& arguments) {
    const auto choices = static_cast<int64_t>(arguments.positional.size());
    if (choices == 0) context.Fail("loop.cycle needs arguments");
    return arguments.positional[static_cast<size_t>(i % choices)];
  };
  // A namespace: the neighbours may be as deep as a value can be.
  return Value::NewNamespace(
      {{"index", i + 1},
       {"index0", i},
       {"revindex", count - i},
       {"revindex0", count - i - 1},
       {"first", i == 0},
       {"last", i + 1 == count},
       {"length", count},
       {"depth", int64_t{1}},  // of loops that call themselves
       {"depth0", int64_t{0}},
       {"cycle", Value::Callable(cycle)},
       {"previtem", i > 0 ? items[index - 1] : Value(Undefined{"loop.previtem"})},
       {"nextitem", i + 1 < count ? items[index + 1] : Value(Undefined{"loop.nextitem"})}});
}

Interpreter::Flow Interpreter::RunFor(const Node& node) {
  const List items = LoopItems(node);
  bool finished = false;  // a round reached the end of the body: what Jinja asks before an "else"
  for (size_t i = 0; i < items.size(); ++i) {
    context_.line = node.line;
    context_.Step(kStepsPerRound);
    scopes_.emplace_back();
    Assign(node.names, items[i]);
    scopes_.back().insert_or_assign("loop", LoopVariable(items, i));
    const Flow flow = RunBody(node.bodies[0]);
    scopes_.pop_back();
    if (flow == Flow::kBreak) break;
    finished = finished || flow == Flow::kNext;
  }
  return finished ? Flow::kNext : RunBody(node.bodies[1]);
}

void Interpreter::Assign(const std::vector<std::string>& targets, const Value& value) {
  if (targets.size() == 1) {
    scopes_.back().insert_or_assign(targets[0], value);
    return;
  }
  const List parts = context_.Items(value);
  if (parts.size() != targets.size()) {
    context_.Fail("expected ", targets.size(), " values to unpack, found ", parts.size());
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    scopes_.back().insert_or_assign(targets[i], parts[i]);
  }
}

void Interpreter::AssignAttribute(const std::string& name, const std::string& attribute,
                                  Value value) {
  for (size_t i = scopes_.size(); i-- > 0;) {
    const auto found = scopes_[i].find(name);
    if (found == scopes_[i].end()) continue;
    if (!found->second.is_namespace()) break;
    // One that held itself could be neither freed nor written.
    if (value.depth() >= Context::kMaxValueDepth) {
      context_.Fail("a namespace cannot hold another, or values that are nested deeply");
    }
    found->second.AsNamespace().insert_or_assign(attribute, std::move(value));
    return;
  }
  context_.Fail("cannot set '", name, ".", attribute, "': '", name, "' is not a namespace");
}

void Interpreter::Set(const Node& node, Value value) {
  if (node.text.empty()) return Assign(node.names, value);
  AssignAttribute(node.names[0], node.text, std::move(value));
}

Value Interpreter::CaptureFiltered(const Node& node) {
  scopes_.emplace_back();
  Value value = Value::String(Capture(node.bodies[0]));
  if (node.kids[0]) {
    scopes_.back().insert_or_assign("", value);
    value = Evaluate(*node.kids[0]);
  }
  scopes_.pop_back();
  return value;
}

void Interpreter::RunMacro(const Node& node) {
  const auto call = [this, &node](Context&, const Arguments& arguments) {
    return CallMacro(node, arguments);
  };
  List parameters;
  for (const std::string& name : node.names) parameters.push_back(Value::String(name));
  const auto takes = [&node](const char* name) {
    return std::ranges::count(node.catches, name) > 0;
  };
  scopes_.back().insert_or_assign(
      node.text,
      Value::Callable(call, {{"name", Value::String(node.text)},
                             {"arguments", context_.MakeList(std::move(parameters), "tuple")},
                             {"catch_varargs", takes("varargs")},
                             {"catch_kwargs", takes("kwargs")},
                             {"caller", false}}));
}

// Variables of a macro: its parameters, and where its body asks for them the arguments beyond
// these.
Interpreter::Scope Interpreter::MacroScope(const Node& macro, const Arguments& arguments) {
  Scope scope;
  const size_t count = macro.names.size();
  const auto catches = [&macro](const char* name) {
    return std::ranges::count(macro.catches, name) > 0;
  };
  List more;
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    const Value& value = arguments.positional[i];
    if (i < count) {
      scope.insert_or_assign(macro.names[i], value);
    } else {
      more.push_back(value);
    }
  }
  if (!more.empty() && !catches("varargs")) {
    context_.Fail("macro '", macro.text, "' takes at most ", count, " arguments");
  }
  if (catches("varargs")) {
    scope.insert_or_assign("varargs", context_.MakeList(std::move(more), "tuple"));
  }
  Dict others;
  for (const auto& [name, value] : arguments.named) {
    const auto at = std::ranges::find(macro.names, name) - macro.names.begin();
    if (at < static_cast<ptrdiff_t>(std::min(count, arguments.positional.size()))) {
      context_.Fail("macro '", macro.text, "' has two values for '", name, "'");
    }
    if (at < static_cast<ptrdiff_t>(count)) {
      scope.insert_or_assign(name, value);
    } else if (catches("kwargs")) {
      others.emplace_back(Value::String(name), value);
    } else {
      context_.Fail("macro '", macro.text, "' has no argument '", name, "'");
    }
  }
  if (catches("kwargs")) scope.insert_or_assign("kwargs", context_.MakeDict(std::move(others)));
  return scope;
}

Value Interpreter::CallMacro(const Node& macro, const Arguments& arguments) {
  context_.Enter();
  context_.Step(static_cast<int64_t>(scopes_.size()));
  Scope scope = MacroScope(macro, arguments);
  std::vector<Scope> callers(std::make_move_iterator(scopes_.begin() + 1),
                             std::make_move_iterator(scopes_.end()));
  scopes_.resize(1);
  scopes_.push_back(std::move(scope));
  for (size_t i = 0; i < macro.names.size(); ++i) {
    if (scopes_.back().contains(macro.names[i])) continue;
    const Node* otherwise = macro.kids[i].get();
    Value value = otherwise ? Evaluate(*otherwise) : Value(Undefined{macro.names[i]});
    scopes_.back().insert_or_assign(macro.names[i], std::move(value));
  }
  std::string text = Capture(macro.bodies[0]);
  scopes_.resize(1);
  for (Scope& caller : callers) scopes_.push_back(std::move(caller));
  context_.Leave();
  return Value::String(std::move(text));
}

}  // namespace treadle::jinja
