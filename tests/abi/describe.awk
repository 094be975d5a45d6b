# Prints the declarations of public headers, one per line: awk -f describe.awk include/onebit/*.h
#
#   function HEADER NAME RESULT (TYPE, ...)      parameter names are left out
#   struct HEADER TYPE grows|fixed               grows: the struct begins with its size, or it is only
#                                                ever the last field of such a struct
#   field HEADER TYPE NAME DECLARATION           one line per field, in order
#   constant HEADER NAME                         an enum constant, or a macro that is an integer
#
# The headers have typedefs of enums and structs with bodies, functions, and pointers to functions as
# fields. Other declarations, such as typedefs of handles, are ignored.

BEGIN { RS = "\001" } # a header is one record

{
  header = FILENAME
  sub(".*/", "", header)
  text = $0
  while (at = index(text, "/*")) {
    rest = substr(text, at + 2)
    text = substr(text, 1, at - 1) " " substr(rest, index(rest, "*/") + 2)
  }
  gsub(/\\\n/, " ", text)
  count = split(text, line, /[ ]*\n/)
  text = plus = ""
  for (k = 1; k <= count; k++) {
    if (line[k] ~ /^#ifdef __cplusplus/) plus = 1 # declarations for C++ alone are ignored
    else if (line[k] ~ /^#endif/) plus = 0
    else if (line[k] ~ /^#define[ ]+(onebit|ONEBIT)_[A-Za-z0-9_]+[ ]/) print_macro(line[k])
    else if (line[k] !~ /^#/ && !plus) text = text " " line[k]
  }
  print_declarations(text)
}

END {
  for (k = 1; k <= structs; k++)
    print "struct", where[k], named[k], \
      sized[named[k]] || last[named[k]] && !inner[named[k]] ? "grows" : "fixed"
}

function print_macro(s,    name, value) {
  split(s, word, /[ ]+/)
  name = word[2]
  value = s
  sub(/^#define[ ]+[A-Za-z0-9_]+[ ]+/, "", value)
  gsub(/u?int[0-9]*_t|size_t/, "", value)
  if (name !~ /^ONEBIT_VERSION_/ && value ~ /[0-9]/ && value ~ /^[-+*<()0-9xXuUlL ]+$/)
    print "constant", header, name
}

# Prints the declarations of one header: each ends with a semicolon outside of braces.
function print_declarations(text,    k, c, depth, statement) {
  gsub(/[ \t]+/, " ", text)
  for (k = 1; k <= length(text); k++) {
    c = substr(text, k, 1)
    depth += (c == "{") - (c == "}")
    if (c != ";" || depth) { statement = statement c; continue }
    sub(/^ /, "", statement)
    print_declaration(statement)
    statement = ""
  }
}

function print_declaration(s,    body, name) {
  body = name = s
  sub(/^[^{]*{ ?/, "", body)
  sub(/ ?}[^}]*$/, "", body)
  sub(/.*} ?/, "", name)
  if (s ~ /^typedef enum [^{]*{/) print_constants(body)
  else if (s ~ /^typedef struct [^{]*{/) print_fields(name, body)
  else if (s !~ /^typedef/ && s ~ /(onebit|ONEBIT)_[A-Za-z0-9_]+\(.*\)$/) print_prototype(s)
}

function print_constants(body,    n, k, part) {
  n = split(body, part, /,/)
  for (k = 1; k <= n; k++) {
    gsub(/=.*|[ ]/, "", part[k])
    if (part[k] != "") print "constant", header, part[k]
  }
}

function print_fields(name, body,    n, k, m, j, part, item, type, field) {
  where[++structs] = header
  named[structs] = name
  sized[name] = body ~ /^size_t size;/
  sub(/;$/, "", body)
  n = split(body, part, /;/)
  for (k = 1; k <= n; k++) {
    sub(/^ /, "", part[k])
    if (match(part[k], /\(\*[A-Za-z0-9_]+\)/)) {
      print "field", header, name, substr(part[k], RSTART + 2, RLENGTH - 3), part[k]
      continue
    }
    m = split(part[k], item, /, ?/)
    type = item[1]
    sub(/[A-Za-z0-9_]+(\[[^]]*\])?$/, "", type)
    sub(/ $/, "", type)
    if (k == n && m == 1 && sized[name]) last[type] = 1
    else inner[type] = 1
    for (j = 1; j <= m; j++) {
      field = item[j]
      sub(/.*[ *]/, "", field)
      item[j] = field
      sub(/\[.*/, "", field)
      print "field", header, name, field, type substr(item[j], length(field) + 1)
    }
  }
}

function print_prototype(s,    name, result, parameters, n, k, part, list, pointed) {
  parameters = result = s
  sub(/^[^(]*\(/, "", parameters)
  sub(/\)$/, "", parameters)
  sub(/\(.*/, "", result)
  name = result
  sub(/.*[ *]/, "", name)
  result = substr(result, 1, length(result) - length(name))
  sub(/ $/, "", result)
  n = split(parameters, part, /, ?/)
  for (k = 1; k <= n; k++) {
    sub(/\[\]$/, " *", part[k])
    if (part[k] !~ /^(void|\.\.\.)$/) sub(/[A-Za-z0-9_]+( \*)?$/, "&@", part[k])
    sub(/[A-Za-z0-9_]+@$/, "", part[k])
    sub(/[A-Za-z0-9_]+ \*@$/, "*", part[k])
    sub(/ $/, "", part[k])
    pointed = part[k]
    gsub(/^const | ?\*$/, "", pointed)
    inner[pointed] = 1
    list = list (k > 1 ? ", " : "") part[k]
  }
  print "function", header, name, result " (" list ")"
}
