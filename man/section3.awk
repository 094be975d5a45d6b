# Makes a page of section 3 from a public header. The header's comments are the text of the page, so
# the header and the manual cannot differ. Usage:
# awk -v version=0.2.0 -v date=2026-11-22 -v examples="a.c b.c" -f section3.awk plan.h
#
# The opening comment becomes the description. A comment and the declarations right below it become
# a section of types or of functions. An indented block in a comment is printed unchanged (formulas,
# examples). If its first column names a parameter of the functions below it, it becomes a list.
# "Errors:" and " - " begin paragraphs of their own.

FNR == 1 {
  header = FILENAME
  sub(".*/", "", header)
  page = "onebit_" header
  sub(/\.h$/, "", page)
}

/^#include "onebit\// {
  name = $2
  gsub(/"|onebit\/|\.h/, "", name)
  also = also ",\n.BR onebit_" name " (3)"
}

# Lines for C++ only, and the include guard, are left out.
/^#ifdef __cplusplus/ { plus = 1 }
/^#endif/ { plus = 0; next }
plus || /^#(if|include|define [A-Z_]*_H$)/ || /clang-format o/ { next }

# An item is a run of comments and declarations outside of braces, without an empty line in it.
/^ *$/ && !depth && !comment { item_ends(); next }
{
  if (!code && /^\/\*/) comment = 1
  if (comment) {
    line = $0
    sub(/^ ?\/?\*\/?/, "", line)
    sub(/^ /, "", line)
    if (sub(/ *\*\/ *$/, "", line) || $0 ~ /^ *\*\/$/) comment = 0
    if (!($0 ~ /^ *(\/\*|\*\/)$/)) doc[++docs] = line
    if (!comment && !described) { description_ends(); next }
    next
  }
  code++
  source[code] = $0
  plain = $0
  gsub(/\/\*.*/, "", plain)
  depth += gsub(/{/, "{", plain) - gsub(/}/, "}", plain)
}

END {
  item_ends()
  print_page()
}

function description_ends(    k) {
  for (k = 1; k <= docs; k++) opening[k] = doc[k]
  openings = docs
  described = 1
  docs = 0
}

function item_ends(    k, all, kind, title, name, names_of_item) {
  if (!code || source[1] ~ /^#define ONEBIT_[A-Z_]*_INIT/) { docs = code = 0; return }
  kind = "types"
  for (k = 1; k <= code; k++) {
    all = all " " source[k]
    if (source[k] ~ /^[^#]*(onebit|ONEBIT)_[A-Za-z0-9_]+\(/) kind = "functions"
  }
  if (all ~ /typedef/) kind = "types"
  names_of_item = declared(all, kind)
  if (names_of_item == "") { docs = code = 0; return }
  if (kind == "functions") {
    for (k = 1; k <= code; k++) synopsis = synopsis "\\fB" verbatim(source[k]) "\\fR\n"
  }
  text = ".SS " names_of_item "\n.nf\n"
  for (k = 1; k <= code; k++) text = text verbatim(source[k]) "\n"
  text = text ".fi\n"
  write(doc, docs, kind == "functions" ? all : "")
  if (kind == "types") types = types text
  else functions = functions text
  docs = code = 0
}

# Returns the names that an item declares, separated by commas. Names of functions and types are also
# added to the names of the page.
function declared(all, kind,    rest, name, list) {
  gsub(/\/\*[^*]*\*\//, "", all)
  if (kind == "functions") {
    gsub(/#define [^(]*\([^)]*\)/, "", all)
    while (match(all, /(onebit|ONEBIT)_[A-Za-z0-9_]+\(/)) {
      name = substr(all, RSTART, RLENGTH - 1)
      list = list (list == "" ? "" : ", ") name
      all = substr(all, RSTART + RLENGTH)
    }
  } else if (all ~ /typedef/) {
    sub(/;[^;]*$/, "", all)
    if (all !~ /\{/ && match(all, /\(\*[A-Za-z0-9_]+\)\(/)) all = substr(all, RSTART + 2, RLENGTH - 4) # the type of a function
    sub(/.*[ *}]/, "", all)
    list = all
  } else {
    while (match(all, /#define [A-Z_0-9]+/)) {
      list = list (list == "" ? "" : ", ") substr(all, RSTART + 8, RLENGTH - 8)
      all = substr(all, RSTART + RLENGTH)
    }
  }
  if (list !~ /^ONEBIT_[A-Z_0-9]*(,|$)/) names = names ", " list
  return list
}

# --- Text

function verbatim(s) {
  gsub(/\\/, "\\e", s)
  gsub(/-/, "\\-", s)
  gsub(/\^/, "\\(ha", s)
  gsub(/~/, "\\(ti", s)
  gsub(/'/, "\\(aq", s)
  gsub(/`/, "\\(ga", s)
  return (s ~ /^\./ ? "\\&" : "") s
}

function prose(s) {
  gsub(/\\/, "\\e", s)
  gsub(/\^/, "\\(ha", s)
  gsub(/~/, "\\(ti", s)
  gsub(/--/, "\\-\\-", s)
  gsub(/onebit-/, "onebit\\-", s)
  gsub(/ -/, " \\-", s)
  return s
}

# Adds a paragraph to the page in lines of at most 78 characters. Each sentence begins a line.
function fill(s,    n, k, word, line) {
  n = split(prose(s), word, / +/)
  for (k = 1; k <= n; k++) {
    if (word[k] == "") continue
    if (line != "" && (length(line) + 1 + length(word[k]) > 78 || line ~ /[.?!]$/)) {
      put(line)
      line = ""
    }
    line = line (line == "" ? "" : " ") word[k]
  }
  if (line != "") put(line)
}

function put(line) {
  text = text (line ~ /^[.']/ ? "\\&" : "") line "\n"
}

# Begins a paragraph, unless the text before it is a heading.
function begin_paragraph() {
  if (text !~ /(\.S[HS] [^\n]*|\.PP)\n$/) text = text ".PP\n"
}

# Adds lines 1 to n of a comment to the page. Lists in the comment may name parameters of the
# declarations in code.
function write(lines, n, code,    k, paragraph) {
  paragraph = ""
  for (k = 1; k <= n; k++) {
    if (lines[k] ~ /^ +- /) { flush(paragraph); paragraph = ""; k = bullet(lines, n, k) }
    else if (lines[k] ~ /^  /) {
      flush(paragraph)
      paragraph = ""
      k = names_parameter(lines[k], code) ? list(lines, n, k) : display(lines, n, k)
    } else if (lines[k] ~ /^ *$/) { flush(paragraph); paragraph = "" }
    else {
      if (lines[k] ~ /^(Errors|Result|Memory|Source|Threads)[^.:]*:/) {
        flush(paragraph)
        paragraph = ""
      }
      paragraph = paragraph " " lines[k]
    }
  }
  flush(paragraph)
}

function flush(paragraph) {
  if (paragraph == "") return
  begin_paragraph()
  fill(paragraph)
}

function bullet(lines, n, k,    paragraph) {
  paragraph = lines[k]
  sub(/^ +- /, "", paragraph)
  while (k < n && lines[k + 1] ~ /^   / && lines[k + 1] !~ /^ +- /) paragraph = paragraph lines[++k]
  text = text ".IP \\(bu 2\n"
  fill(paragraph)
  return k
}

function names_parameter(line, code,    name) {
  if (line !~ /^  [a-z][a-z_0-9]*(, [a-z_0-9]+)*   +[^ ]/) return 0
  name = line
  sub(/^  /, "", name)
  sub(/[, ].*/, "", name)
  return code ~ ("[ *]" name "[,)]")
}

function list(lines, n, k,    paragraph, name) {
  for (; k <= n && lines[k] ~ /^  /; k++) {
    if (lines[k] !~ /^   /) {
      if (name != "") fill(paragraph)
      name = lines[k]
      sub(/^  /, "", name)
      sub(/   .*/, "", name)
      paragraph = substr(lines[k], 3 + length(name))
      text = text ".TP\n.I " name "\n"
    } else paragraph = paragraph " " lines[k]
  }
  fill(paragraph)
  return k - 1
}

function display(lines, n, k,    last) {
  for (last = k; last < n && (lines[last + 1] ~ /^ / || lines[last + 1] == ""); last++);
  while (lines[last] == "") last--
  begin_paragraph()
  text = text ".nf\n"
  for (; k <= last; k++) text = text verbatim(lines[k]) "\n"
  text = text ".fi\n"
  return last
}

# --- The page

function purpose(    k, s) {
  for (k = 1; k <= openings && opening[k] != ""; k++) s = s (k > 1 ? " " : "") opening[k]
  sub(/\. .*/, "", s)
  sub(/ \(.*/, "", s)
  if (length(s) > 60) sub(/: .*/, "", s)
  sub(/\.$/, "", s)
  return prose(s)
}

function print_page(    n, k, part) {
  printf ".\\\" Made from onebit/%s by section3.awk.\n", header
  printf ".TH %s 3 %s \"onebit %s\" \"onebit's interface\"\n", toupper(page), date, version
  printf ".nh\n.ad l\n.SH NAME\n"
  n = split(page names, part, /, /)
  line = ""
  for (k = 1; k <= n; k++) printf "%s%s", part[k], (k < n ? ",\n" : "\n")
  printf "\\- %s\n", purpose()
  printf ".SH SYNOPSIS\n.nf\n.B #include <onebit/%s>\n", header
  if (synopsis != "") printf ".PP\n%s", synopsis
  printf ".fi\n"
  printf ".PP\nLink with\n.BR \\-lonebit ;\n.B pkg\\-config onebit\nhas the flags.\n"
  text = ".SH DESCRIPTION\n"
  write(opening, openings, "")
  printf "%s", text
  if (types != "") printf ".SH TYPES AND CONSTANTS\n%s", types
  if (functions != "") printf ".SH FUNCTIONS\n%s", functions
  print_example()
  printf ".SH SEE ALSO\n.BR onebit (7)%s\n", also
}

# Prints the first of `examples`, which are C files, that calls a function of the page. The page of an
# optimizer without an example gets that of Efficient-Adam, because both are created and used alike.
function print_example(    k, file, line, n, part, optimizer) {
  optimizer = also ~ /onebit_optimizer / && names ~ page "_create" && names !~ page "_step" # not outer.h
  n = split(examples, file, " ")
  for (k = 1; k <= n; k++) {
    part = ""
    calls = 0
    while ((getline line < file[k]) > 0) {
      if (optimizer && page !~ /efficient/) {
        gsub(/onebit_efficient_adam_create/, page "_create", line)
        sub(/ with Efficient-Adam/, "", line)
      }
      if (match(line, /(onebit|ONEBIT)_[A-Za-z0-9_]+\(/))
        calls += index(names ",", ", " substr(line, RSTART, RLENGTH - 1) ",") > 0
      part = part verbatim(line) "\n"
    }
    close(file[k])
    if (calls) {
      printf ".SH EXAMPLES\n.nf\n%s.fi\n", part
      return
    }
  }
}
