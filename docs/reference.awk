# Turns a header's comments into what Doxygen reads, on standard output; docs/Doxyfile runs it on
# each header. The headers stay prose:
#
#   /* ... */ before a declaration   its description; several declarations without an empty line
#                                    between them share it
#   code; /* ... */                  the description of a member, a value or a macro
#   the first comment                the file's
#   indented "  name   meaning"      a parameter, where the declaration has one of that name
#   other indented lines             a formula or a table: shown as they are
#   Errors: Result: Threads: Memory: a section of that name
#   names that headers declare       links
#   a call in the shape of MPI's     parameters without words are those of MPI's call
#   nothing                          a member has the words of the one before it, a value its number
#
# One argument, the header. Names are collected from the headers in its directory. Of the main page,
# reference.md, links to headers become their names, which Doxygen links to their pages.

BEGIN {
  directory = ARGV[1]
  if (!sub(/\/[^\/]*$/, "", directory)) directory = "."
  list = "ls " directory "/*.h " directory "/*.hpp 2>/dev/null"
  while ((list | getline header) > 0) {
    collect_names(header)
  }
}

{ line[NR] = $0 }

END {
  if (ARGV[1] ~ /\.md$/) {
    main_page()
    exit
  }
  for (at = 1; at <= NR; ) {
    if (line[at] ~ /clang-format o(n|ff)/ || line[at] ~ /^[ \t]*\/\/ *$/) at++
    else if (line[at] ~ /^[ \t]*\/\*/) comment_line()
    else if (line[at] ~ /[^ \t].*\/\*/ && line[at] !~ /\\$/) trailing_comment()
    else plain_line()
  }
}

function main_page(i, text) {
  for (i = 1; i <= NR; i++) {
    text = line[i]
    gsub(/\]\(\.\.\/include\/onebit\/[a-z_]+\.hp*\)/, "\001", text)
    while (match(text, /\[[a-z_]+\.hp*\001/)) {
      text = substr(text, 1, RSTART - 1) substr(text, RSTART + 1, RLENGTH - 2) \
        substr(text, RSTART + RLENGTH)
    }
    print text
  }
}

# What code, not comments, mentions: a variable of the environment, for example, is not among it.
function collect_names(file, text, inside, code) {
  while ((getline text < file) > 0) {
    code = ""
    while (text != "") {
      if (inside) {
        if (!index(text, "*/")) break
        text = substr(text, index(text, "*/") + 2)
        inside = 0
      } else if (index(text, "/*")) {
        code = code substr(text, 1, index(text, "/*") - 1)
        text = substr(text, index(text, "/*") + 2)
        inside = 1
      } else {
        code = code text
        text = ""
      }
    }
    if (code ~ /^#(ifndef|define) ONEBIT_[A-Z_0-9]*_HP*$/) continue
    while (match(code, /(onebit|ONEBIT)_[A-Za-z0-9_]+/)) {
      known[substr(code, RSTART, RLENGTH)] = 1
      code = substr(code, RSTART + RLENGTH)
    }
  }
  close(file)
}

function plain_line(name) {
  if (line[at] ~ /^typedef (struct|enum).*\{$/) said = ""
  if (line[at] ~ /^typedef struct [a-z_]+ \*[a-z_]+;$/) {
    print "/** A handle on what is the library's own. */"
  } else if (line[at] ~ /^  (ONEBIT_[A-Z0-9_]+ = -?[0-9]+,?|[a-z_0-9]+ [a-z_0-9]+;)$/) {
    print member(line[at++])
    return
  }
  if (line[at] ~ /^#define [A-Z_]+_INIT/) {
    name = line[at]
    sub(/^#define /, "", name)
    sub(/[^A-Z_].*/, "", name)
    sub(/_INIT$/, "_t", name)
    print "/** What a #" tolower(name) " starts from: every option at its default. */"
  }
  print line[at++]
}

# A member or value without a comment.
function member(text, number) {
  if (text ~ /=/) {
    number = text
    gsub(/.*= |[ ,]/, "", number)
    return text " /**< " number " */"
  }
  if (text ~ / size;/) return text " /**< the size of this structure, set by the caller */"
  if (text ~ / common;/) return text " /**< what all optimizers have */"
  return text " /**< " said " */"
}

# The comment that begins at line `at`, without its marks: body[1 .. lines]. Returns what is before.
function take_comment(start, before, text) {
  start = index(line[at], "/*")
  before = substr(line[at], 1, start - 1)
  text = substr(line[at], start + 2)
  lines = 0
  while (!index(text, "*/") && at < NR) {
    body[++lines] = text
    text = line[++at]
    sub(/^[ \t]*\* ?/, "", text)
    sub(/^\/$/, "*/", text)
  }
  at++
  rest = substr(text, index(text, "*/") + 2)
  sub(/ *\*\/.*/, "", text)
  body[++lines] = text
  sub(/^ /, "", body[1])
  return before
}

function trailing_comment(before) {
  before = take_comment()
  said = described("")
  print_members(before, "/**< " said " */" rest)
}

# `type a, b;` has one comment for all of them, where Doxygen would give it to the first.
function print_members(statement, comment, type, part, count, i) {
  if (statement !~ /^  [a-z0-9_]+ [a-z_]+(, [a-z_]+)+; *$/) {
    print statement comment
    return
  }
  type = statement
  sub(/^ +/, "", type)
  sub(/ .*/, "", type)
  sub(/^ +[a-z0-9_]+ /, "", statement)
  sub(/; *$/, "", statement)
  count = split(statement, part, ", ")
  for (i = 1; i <= count; i++) print "  " type " " part[i] "; " comment
}

function comment_line(indent, words, shared, statement) {
  indent = take_comment()
  if (!said_file++) {
    print "/** @file\n" described("") "\n*/"
    return
  }
  if (line[at] ~ /^[ \t]*$/ || line[at] ~ /^[ \t]*\/\*/) return
  do {
    statement = take_statement()
    said = described(statement)
    if (statement ~ /^  [a-z0-9_]+ [a-z_]+(, [a-z_]+)+;$/) {
      print_members(statement, "/**< " said " */")
      at += taken
      return
    }
    print indent "/** " said "\n" indent "*/"
    if (statement ~ /\/\*/ || statement ~ /\{[^}]*$/) {
      return # a member with a comment of its own, or a type: its lines are looked at one by one
    }
    print_statement(statement)
    at += taken
    shared = indent == "" && at <= NR && line[at] !~ /^[ \t]*$/ && line[at] ~ /^[A-Za-z#]/ &&
      line[at] !~ /^#(endif|if|else|ifdef|ifndef|undef)/ && line[at] !~ /_INIT/
  } while (shared)
}

# An enumeration in one line is taken apart: its values have comments, too.
function print_statement(statement, part, count, i) {
  if (statement !~ /^typedef enum [a-z_]+ \{.*\}/) {
    print statement
    return
  }
  count = split(statement, part, /[{},]/)
  print part[1] "{"
  for (i = 2; i < count; i++) print member(" " part[i] (i < count - 1 ? "," : ""))
  print "}" part[count]
}

# The statement at line `at`, taken lines long; `at` stays.
function take_statement(text, last) {
  taken = 0
  do {
    last = line[at + taken++]
    text = text (text == "" ? "" : "\n") last
  } while (at + taken <= NR && (line[at] ~ /^#/ ? last ~ /\\$/ : last !~ /[;{}]/ && last !~ /,.*\/\*/))
  return text
}

function escaped(text) {
  gsub(/\\/, "\\\\", text)
  gsub(/&/, "\\&amp;", text)
  gsub(/</, "\\&lt;", text)
  gsub(/>/, "\\&gt;", text)
  gsub(/@/, "\\@", text)
  gsub(/#/, "\\#", text)
  gsub(/%/, "\\%", text)
  gsub(/--/, "\\--", text)
  return linked(text)
}

function linked(text, result, name) {
  while (match(text, /(onebit|ONEBIT)_[A-Za-z0-9_]+/)) {
    name = substr(text, RSTART, RLENGTH)
    result = result substr(text, 1, RSTART - 1) (name in known ? "#" : "") name
    text = substr(text, RSTART + RLENGTH)
  }
  return result text
}

function is_parameter(text, statement, name) {
  if (statement !~ /\(/ || text !~ /^ +[a-z_][a-z0-9_]*(, [a-z_][a-z0-9_]*)*  +[^ ]/) return ""
  name = text
  sub(/^ +/, "", name)
  sub(/  .*/, "", name)
  return name
}

# The parameters in `names` that the statement has: "a" or "a,b"; "" for none.
function present(names, statement, part, count, i, found) {
  count = split(names, part, ", ")
  for (i = 1; i <= count; i++) {
    if (statement ~ ("[^a-z_A-Z0-9]" part[i] "(\\[\\])?[,)]")) {
      found = found (found == "" ? "" : ",") part[i]
    }
  }
  return found
}

function parameter_text(text) {
  sub(/^ +[a-z_][a-z0-9_]*(, [a-z_][a-z0-9_]*)*  +/, "", text)
  return text
}

function parameter_line(names, text, direction) {
  direction = sub(/^out: +/, "", text) ? "[out]" : ""
  parameters = parameters "," names ","
  if (direction == "" && text ~ /^out$/) text = "the result"
  return "@param" direction " " names " " escaped(text)
}

# What Doxygen is to read of body[1 .. lines]. mode: "" text, "parameter", "dropped" (a parameter of
# another statement), "list", "as it is".
function described(statement, i, text, mode, result, names, deeper) {
  mode = parameters = ""
  for (i = 1; i <= lines; i++) {
    text = body[i]
    names = is_parameter(text, statement)
    deeper = text ~ /^  /
    if (mode == "as it is" && !deeper && !(text == "" && body[i + 1] ~ /^  /)) {
      result = result "@endverbatim\n"
      mode = ""
    }
    if (mode == "as it is") result = result text "\n"
    else if (text == "") { result = result "\n"; mode = "" }
    else if (text ~ /^ *- /) { result = result escaped(text) "\n"; mode = "list" }
    else if (names != "" && present(names, statement) != "") {
      result = result (mode == "" ? "\n" : "") \
        parameter_line(present(names, statement), parameter_text(text)) "\n"
      mode = "parameter"
    } else if (names != "" && (mode == "parameter" || mode == "dropped" || mode == "")) mode = "dropped"
    else if (deeper && mode == "dropped") continue
    else if (deeper && (mode == "parameter" || mode == "list")) result = result escaped(text) "\n"
    else if (deeper) { result = result "@verbatim\n" text "\n"; mode = "as it is" }
    else {
      if (mode != "") result = result "\n"
      mode = ""
      result = result section(text) "\n"
    }
  }
  if (mode == "as it is") result = result "@endverbatim\n"
  sub(/\n+$/, "", result)
  return result mpis_parameters(statement)
}

function mpis_parameters(statement, result, name) {
  if (statement !~ /ONEBIT_[A-Z][a-z_]+\(/) return ""
  while (match(statement, /[a-z_]+(\[\])?[,)]/)) {
    name = substr(statement, RSTART, RLENGTH)
    sub(/[^a-z_].*/, "", name)
    statement = substr(statement, RSTART + RLENGTH)
    if (name != "void" && !index(parameters, "," name ",")) {
      result = result "\n@param " name " as in MPI's call"
    }
  }
  return (result == "" ? "" : "\n") result
}

function section(text) {
  if (match(text, /^(Errors|Threads|Memory|Result)[^:.;(]*: /)) {
    return "\n@par " substr(text, 1, RLENGTH - 2) "\n" escaped(substr(text, RLENGTH + 1))
  }
  return escaped(text)
}
