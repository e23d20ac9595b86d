"""Grammars in genuine Lark, each with texts it derives, for tests: the sources of mutants and of example masks."""

from pathlib import Path

import lark

GRAMMARS: dict[str, tuple[str, list[str]]] = {}

GRAMMARS["calc"] = (
    r"""
?start: sum | NAME "=" sum
?sum: product | sum "+" product | sum "-" product
?product: atom | product "*" atom | product "/" atom
?atom: NUMBER | "-" atom | NAME | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
""",
    ["a = 1+2*(3-x)", "12.5e3 / -y", "(1+2)*foo_1", " 7"],
)

GRAMMARS["json"] = (
    r"""
?start: value
?value: object | array | string | SIGNED_NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: string ":" value
string: ESCAPED_STRING
%import common.ESCAPED_STRING
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
""",
    ['{"a": [1, 2.5e-3, true], "b\\\\n": null}', '["x\\"y", {}]', "-1.5", ' [ false , "" ] '],
)

GRAMMARS["sql"] = (
    r"""
start: select (";" select)* ";"?
select: "SELECT"i ("*" | cols) "FROM"i NAME ["WHERE"i cond] ["ORDER"i "BY"i NAME ("ASC"i|"DESC"i)?]
cols: col ("," col)*
col: NAME ["AS"i NAME]
cond: cond "OR"i conj | conj
conj: conj "AND"i term | term
term: "NOT"i term | NAME OP val | "(" cond ")"
val: NUM | STR | NAME
OP.2: "<=" | ">=" | "<>" | "=" | "<" | ">"
NAME.1: /(?!(select|from|where|order|by|as|or|and|not|asc|desc)\b)[a-z_][a-z0-9_]*/i
NUM: /\d+(\.\d+)?/
STR: /'.*?'/
COMMENT: /--[^\n]*/
%ignore /\s+/
%ignore COMMENT
""",
    [
        "SELECT a, b AS c FROM t WHERE x <= 1.5 AND NOT y = 'z z' ORDER BY a DESC",
        "select * from t1;",
        "select a from b where (c=d or e<>'') -- hi",
    ],
)

GRAMMARS["c"] = (
    r"""
start: (func | decl)*
func: type NAME "(" [param ("," param)*] ")" block
param: type NAME
decl: type NAME ["=" expr] ";"
block: "{" stmt* "}"
stmt: decl | block | "if" "(" expr ")" stmt ["else" stmt] | "while" "(" expr ")" stmt | "return" [expr] ";" | expr ";"
type: "int" | "char" "*"?
?expr: NAME "=" expr | cmp
?cmp: sum (CMP sum)?
?sum: prod (("+"|"-") prod)*
?prod: atom (("*"|"/") atom)*
?atom: NAME | INT | STRING | "(" expr ")" | NAME "(" [expr ("," expr)*] ")"
CMP.2: "==" | "<=" | ">=" | "<" | ">" | "!="
NAME: /[a-zA-Z_]\w*/
STRING: /"(?:[^"\\\n]|\\.)*"/
%import common.INT
%import common.WS
%import common.C_COMMENT
%import common.CPP_COMMENT
%ignore WS
%ignore C_COMMENT
%ignore CPP_COMMENT
""",
    [
        "int f(int x, char * y) { return x+1; }",
        'int x = 3; /* c */ char* s = "a\\"b";',
        "int g(){ if (x == y) { h(1,2); } else return; while (a) b = c; } // end\n",
    ],
)

GRAMMARS["verilog"] = (
    r"""
start: module+
module: "module" NAME ["(" NAME ("," NAME)* ")"] ";" item* "endmodule"
item: ("input" | "output" | "wire" | "reg") range? NAME ("," NAME)* ";"
    | "assign" NAME "=" expr ";"
    | "always" "@" "(" edge ")" NAME "<=" expr ";"
edge: ("posedge" | "negedge") NAME
range: "[" INT ":" INT "]"
?expr: term (("&" | "|" | "^" | "+") term)*
?term: "~" term | NAME | SIZED | INT | "(" expr ")"
SIZED.2: /[0-9]+'[bdh][0-9a-fA-F_]+/
NAME: /(?!(module|endmodule|input|output|wire|reg|assign|always|posedge|negedge)\b)[a-zA-Z_]\w*/
INT: /[0-9]+/
COMMENT: /\/\/[^\n]*/
%ignore /\s+/
%ignore COMMENT
""",
    [
        "module m(a, b); input [3:0] a; assign b = ~a & 4'b10_1; endmodule",
        "module x; reg r; always @(posedge clk) r <= (r + 1); // c\nendmodule",
    ],
)

GRAMMARS["templates"] = (
    r"""
start: "let" bind{NAME, num} ("," bind{NAME, num})* | list{num} | list{NAME}
bind{k, v}: k "=" v
list{x}: "[" _sep{x, ","} "]"
_sep{x, s}: x (s x)*
num: /[0-9]+/
NAME: /[a-z]+/
%ignore " "
""",
    ["let a = 1, b=22", "[1, 2,3]", "[a,b]"],
)

GRAMMARS["conf"] = (
    r"""
start: _NL? section+
section: "[" NAME "]" _NL pair*
pair: NAME "=" VALUE? _NL
NAME: /[a-z][\w.]*/
VALUE: /[^\n#\[=\s][^\n#]*/
_NL: /(\r?\n[ \t]*)+/
%ignore /[ \t]+/
%ignore /#[^\n]*/
""",
    ["[main]\na = 1 2\nb.c=\n", "\n[x]\n\n[y] # hi\nk = v\n"],
)

GRAMMARS["fruitflies"] = (
    r"""
start: noun verb noun -> simple | noun verb "like" noun -> comparative
noun: adj? NOUN
verb: VERB
adj: ADJ
NOUN: "flies" | "bananas" | "fruit"
VERB: "like" | "flies"
ADJ: "fruit"
%import common.WS
%ignore WS
""",
    ["fruit flies like bananas", "flies like fruit", "bananas flies like fruit flies"],
)

GRAMMARS["dot"] = (
    r"""
start: "strict"? ("graph" | "digraph") ID? "{" stmt_list "}"
stmt_list: (stmt ";"?)*
stmt: node_stmt | edge_stmt | attr_stmt | ID "=" ID | subgraph
attr_stmt: ("graph" | "node" | "edge") attr_list
attr_list: ("[" a_list? "]")+
a_list: (ID "=" ID (";" | ",")?)+
edge_stmt: (node_id | subgraph) (EDGEOP (node_id | subgraph))+ attr_list?
node_stmt: node_id attr_list?
node_id: ID port?
port: ":" ID (":" ID)?
subgraph: ("subgraph" ID?)? "{" stmt_list "}"
EDGEOP: "->" | "--"
ID: /[a-zA-Z_][a-zA-Z_0-9]*/ | /-?(\.[0-9]+|[0-9]+(\.[0-9]*)?)/ | /"(?:\\.|[^"\\])*"/
%import common.WS
%import common.C_COMMENT
%ignore WS
%ignore C_COMMENT
""",
    ['digraph G { a -> b [label="x y"]; b -> c }', "graph { node [x=1.5]; a -- b -- { c d }; x=y }"],
)

GRAMMARS["recipe"] = (
    r"""
start: title step+
title: "#" TEXT _NL
step: INT "." action _NL
action: VERB amount? THING ("and" THING)* ("for" DURATION)?
amount: INT UNIT | /half|a/
UNIT: "g" | "ml" | "cups" | "cup"
VERB: "Mix" | "Heat" | "Add" | "Chop"
THING: /[a-z]+(-[a-z]+)*/
DURATION: /[0-9]+ ?(min|h)/
TEXT: /[^\n]+/
INT: /[1-9][0-9]*/
_NL: /\n+/
%ignore " "
""",
    ["# Soup\n1. Chop 2 cups onions and garlic\n2. Heat water for 5 min\n", "# A\n1. Add half salt\n"],
)

GRAMMARS["turtle"] = (
    r"""
start: instruction+
instruction: MOVEMENT NUMBER -> movement
           | "c" COLOR [COLOR] -> change_color
           | "fill" code_block -> fill
           | "repeat" NUMBER code_block -> repeat
code_block: "{" instruction+ "}"
MOVEMENT: "f"|"b"|"l"|"r"
COLOR: LETTER+
%import common.LETTER
%import common.INT -> NUMBER
%import common.WS
%ignore WS
""",
    ["c red yellow fill { repeat 36 { f200 l170 } }", "f1 b 2", "c red f10"],
)

GRAMMARS["python"] = (
    r"""
start: (_NL | stmt)*
?stmt: simple _NL
     | "if" test ":" suite ["else" ":" suite]
     | "while" test ":" suite
     | "def" NAME "(" [NAME ("," NAME)*] ")" ":" suite
suite: _NL _INDENT stmt+ _DEDENT
?simple: NAME "=" test | "return" [test] | "pass" | test
?test: sum (COMP sum)?
?sum: atom (("+"|"-") atom)*
?atom: NAME | INT | STRING | "(" test ")" | NAME "(" [test ("," test)*] ")"
COMP: "==" | "<" | ">"
NAME: /[a-z_]\w*/
STRING: /"[^"\n]*"/
_NL: /(\r?\n[\t ]*)+/
%import common.INT
%ignore /[ \t]+/
%declare _INDENT _DEDENT
""",
    [
        "x = 1\nif x == 2:\n    y = f(x, 3)\n    while y:\n        pass\n\n    return\nelse:\n    pass\nz = x\n",
        "def f(a, b):\n    if a < b:\n        return a\n    return b + 1\n",
        "pass\n",
    ],
)

# lark's own grammar, as the package ships it
GRAMMARS["lark"] = (
    (Path(lark.__file__).parent / "grammars" / "lark.lark").read_text(),
    [
        'start: "a" B?\nB: /x+/i\n',
        "%import common.WS\n%ignore WS\n?a.2: b{c} -> d | [e]~2..3 // hi\n",
    ],
)
