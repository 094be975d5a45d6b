# Makes the list of a program's options for its manual page. A program in C has them in the table by
# which it reads its options (struct tool_option). A script has them in the comment that its --help
# prints, which may go on after the options.
function escaped(s) {
  gsub(/\\n/, " ", s)
  gsub(/\\"/, "\"", s)
  gsub(/-/, "\\-", s)
  gsub(/~/, "\\(ti", s)
  gsub(/\047/, "\\(aq", s)
  return s
}
function fill(s,    n, k, word, line) { # mandoc wants each sentence to begin on a new line
  n = split(escaped(s), word, / +/)
  for (k = 1; k <= n; k++) {
    if (length(line) + length(word[k]) > 77 || (line ~ /[a-z)][.]$/ && word[k] ~ /^[A-Z]/)) {
      print line
      line = ""
    }
    if (line == "" && word[k] ~ /^[.]/) word[k] = "\\&" word[k]
    line = line (line == "" ? "" : " ") word[k]
  }
  print line
}
function paragraph(s) {
  if (s == "") return
  if (any++) print ".PP"
  fill(s)
}
function option(names, argument, help) {
  names = escaped(names)
  sub(/, /, "\\fR, \\fB", names)
  if (argument != "") argument = (argument ~ /^[[]=/ ? "" : " ") "\\fI" escaped(argument) "\\fR"
  any++
  print ".TP\n\\fB" names "\\fR" argument
  fill(help)
}
function own_options() {
  option("-h, --help", "", "prints the usage")
  option((script ? "" : "-v, ") "--version", "", "prints the version of the library")
}

FNR == 1 { script = comment = /^#!/; next }

# A row of a table in C has these strings: the name, the argument if there is one, and the help.
/struct tool_option rows\[\]/ { table = !/TOOL_END/; row = ""; next }
/\.kind = TOOL_END|[{]0}/ { table = 0 }
table { row = row " " $0 }
table && /},$/ {
  letter = match(row, /\047[a-zA-Z]\047/) ? "-" substr(row, RSTART + 1, 1) ", " : ""
  for (n = 0; match(row, /"([^"\\]|\\.)*"/); row = substr(row, RSTART + RLENGTH)) {
    n += substr(row, 1, RSTART - 1) !~ /^ *$/ # adjacent strings without a comma are one string
    value[n] = (substr(row, 1, RSTART - 1) ~ /^ *$/ ? value[n] : "") substr(row, RSTART + 1, RLENGTH - 2)
  }
  if (n == 1) paragraph(value[1])
  else option(letter "--" value[1], n > 2 ? value[2] : "", value[n])
  row = ""
}

# An option in a comment has its text on the same line or below.
comment && !/^#/ { exit }
comment && head != "" && !/^#          / { option(head, argument, help); head = "" }
comment && /^#   -[^ ]/ && !/--version/ {
  if (!any) own_options()
  paragraph(before)
  before = ""
  split(substr($0, 5), part, /  +/)
  help = substr($0, 5 + length(part[1]))
  match(part[1], /^-[^ [=,]*/)
  head = substr(part[1], 1, RLENGTH)
  argument = substr(part[1], RLENGTH + 1)
  sub(/^ /, "", argument)
  sub(/^ +/, "", help)
  next
}
comment && head != "" { sub(/^# +/, ""); help = help (help == "" ? "" : " ") $0; next }
comment && /^#$/ { if (any && before !~ /--version/) paragraph(before); before = "" ; next }
comment { sub(/^# */, ""); before = before (before == "" ? "" : " ") $0 }

END {
  if (!script) own_options()
  else paragraph(before)
}
