"""Write the sample data of the generated project: messages to an online shop's customer service.

    python tools/make_sample.py            # rewrites {{cookiecutter.project_slug}}/sample/*.tsv
    python tools/make_sample.py --check    # exit 1 when the files on disk differ

The texts are invented. A message is put together from phrases: a greeting, something beside the
point, the point itself, details, a goodbye, and then the noise of real people typing. The label
is what the writer wants, which is often not what most of the words are about.

Phrases are a small grammar: `[a|b|]` takes one of its alternatives (the last one here is
nothing), `{name}` takes an entry of SLOTS, and both may be nested.

Only `Random.random()` is used, the one method that Python promises never to change for a seed;
so the files come out the same, byte for byte, on every version and platform.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

SEED = 20240229
SIZES = {"train": 4000, "val": 600, "test": 600}
SAMPLE = Path(__file__).resolve().parents[1] / "{{cookiecutter.project_slug}}" / "sample"

SHARES = {
    "delivery": 0.25,
    "refund": 0.17,
    "product_question": 0.16,
    "payment": 0.12,
    "account": 0.11,
    "complaint": 0.09,
    "praise": 0.06,
    "other": 0.04,
}
# Whom a tired annotator takes for whom.
CONFUSED = {
    "delivery": ["complaint", "complaint", "refund"],
    "refund": ["payment", "complaint", "delivery"],
    "product_question": ["other", "delivery", "refund"],
    "payment": ["refund", "account", "complaint"],
    "account": ["payment", "other", "complaint"],
    "complaint": ["delivery", "refund", "praise"],
    "praise": ["complaint", "delivery", "product_question"],
    "other": ["account", "product_question", "praise"],
}
ASKS = ["delivery", "refund", "product_question", "payment", "account"]
CHINESE, MIXED = 0.17, 0.025  # shares of all messages
BRIEF = 0.13  # a line of a few words and nothing around it
QUOTED = 0.16  # tells of another wish that is over
WRONG, AMBIGUOUS = 0.02, 0.015  # wrong label; two wishes in one message, one of them the label

# -- words ---------------------------------------------------------------------------------------

SLOTS = {
    "wear": """[jacket|raincoat|pair of boots|sweater|dress|pair of trainers|wool scarf|swimsuit
        |pair of jeans|pair of gloves|bathrobe|summer hat]""",
    "device": """[kettle|desk lamp|blender|coffee grinder|headset|toaster|air fryer|keyboard
        |cordless drill|vacuum cleaner|baby monitor|fan|hair dryer|radio|sewing machine]""",
    "thing": """[{wear}|{wear}|{device}|{device}|backpack|phone case|office chair|bike helmet
        |set of curtains|yoga mat|tent|bookshelf|set of sheets|suitcase|frying pan|rug|mirror
        |kids' scooter|garden hose|sleeping bag|board game|water bottle|monitor stand]""",
    "item": "[{thing}|{thing}|{colour} {thing}]",
    "colour": "[black|navy|green|grey|red|beige|white|dark blue|mustard|pink]",
    "size": "[S|M|L|XL|38|40|42|44|10|12]",
    "order": "[#{n5}|{n6}|A{n5}|no. {n6}|{n3}-{n4}|SO{n6}]",
    "money": "[£{n2}|${n2}.{n2}|{n2} euros|{n2}.{n2}|€{n2}|{n2} pounds]",
    "day": "[Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday]",
    "month": "[January|March|April|June|August|October|November]",
    "ago": """[[two|three|five|ten] days ago|last {day}|[a week|two weeks|three weeks] ago|yesterday
        |on the [2nd|5th|11th|19th|23rd]|[at the beginning|at the end|in the middle] of {month}]""",
    "since": "[last {day}|{day}|{month}|yesterday|last week|the weekend|the [2nd|11th|19th]]",
    "long": "[[four|six|nine|twelve] days|[two|three|almost four] weeks|a full month|over a week]",
    "city": "[Leeds|Cork|Ghent|Utrecht|Lyon|Turin|Porto|Graz|Aarhus|Malmo|Bristol|Dresden]",
    "person": "[Anna|Tom|Mira|Jonas|Priya|Helen|Marek|Sofia|Ben|Laura|Omar|Kate]",
    "me": "{person}",
    "who": "[my [wife|husband|sister|dad|neighbour|flatmate]|a colleague|I]",
    "carrier": "[courier|driver|delivery guy|postman|carrier|van driver]",
    "parcel": "[parcel|package|order|box|shipment|stuff]",
    "n2": "[12|15|18|19|24|27|29|35|39|42|49|56|59|64|75|79|85|90|95|99]",
    "n3": "[104|118|233|301|347|412|588|609|731|874|920|955]",
    "n4": "[1048|2207|3391|4460|5172|6605|7719|8034|9126|9983]",
    "n5": "[{n2}{n3}|{n3}{n2}]",
    "n6": "[{n3}{n3}|{n2}{n4}]",
    # The same in Chinese: wear, device, thing, item, colour, long, ago, money, city, order.
    "衣": "[羽绒服|毛衣|连衣裙|牛仔裤|泳衣|运动鞋|风衣|睡衣|雨靴|衬衫]",
    "电": "[电饭锅|台灯|榨汁机|蓝牙耳机|键盘|空气炸锅|吸尘器|电风扇|吹风机|加湿器]",
    "物": "[{衣}|{电}|{电}|双肩包|手机壳|办公椅|头盔|窗帘|帐篷|书架|四件套|行李箱|炒锅|保温杯]",
    "件": "[{物}|{物}|{色}的{物}|{色}{物}]",
    "色": "[黑色|白色|蓝色|灰色|红色|米色|绿色|粉色]",
    "久": "[[三|四|五|六|八|十]天|[一|两|三]个[星期|礼拜]|半个月|快一个月|好久]",
    "时": "[昨天|前天|上周[一|三|五|六]|[三|五|六|八|十]号|上周|上个月|月初|周末]",
    "钱": "[{n2}块|{n3}元|{n2}块{n2}|{n3}块钱]",
    "城": "[苏州|成都|青岛|厦门|长沙|昆明|大连|合肥]",
    "号": "[订单号{n6}|订单{n5}|单号{n6}|订单尾号{n4}]",
}
SLOTS = {name: re.sub(r"\s*\n\s*", "", words) for name, words in SLOTS.items()}
KEPT = {"me", "item", "order", "件", "号"}  # the same all through a message

# -- the point: what the writer wants ------------------------------------------------------------

POINT_EN: dict[str, list[str]] = {
    "delivery": [
        "[where is|where's] my {parcel}? [I ordered {ago}|it should have been here {ago}]",
        "my {parcel} [still hasn't|has not] [arrived|come|turned up] after {long}",
        "tracking [says|shows] [delivered|'out for delivery'] [since {since}|but nothing is here]",
        "when will the {item} [get here|arrive|be with me]? I [need|wanted] it [by|before] {day}",
        "can you [send|redirect|deliver] it to [my office|my new address|{city}|a pickup point]"
        " [instead|from now on|, please]?",
        "the {carrier} left a card but [it has no number|I can't read it], [where do I pick it up"
        "|how do I get a second attempt]?",
        "only [one|two] of the [three|four] boxes came, is the [rest|{item}] on its way?",
        "I [moved|am moving] to {city}, [please change|can you still change] the address on it",
        "the tracking link [hasn't moved|has not been updated|shows the same city] for {long}",
        "[has|did] the {item} [been sent|left the warehouse|go out] yet?",
        "somebody signed for it and it [wasn't me|was nobody here], [can you find out who|where is"
        " it now]?",
        "is it possible to [get it|have it brought] [on {day}|on a Saturday|in the evening]?"
        " [nobody is home before six|I work all day|]",
        "I was [at home|in] all {day} and [nobody rang|no one came|the bell never rang], [please"
        " try again|what happens next]",
        "the {item} was [supposed|meant] to [come|be here] {ago}, any [news|update]?",
        "got someone else's {item}, [where is mine|mine must be with them]",
        "how long does [it take|standard take|the post need] to [{city}|an island|the north]?",
        "the {parcel} seems to be stuck [at customs|in {city}|in the depot], can you [chase|push]"
        " it?",
        "please [hold|keep] the {parcel} until {day}, we are away",
        "it says [collected|handed over] but the shop [can't find|has no trace of] it",
        "they left it [with a neighbour|in the shed|by the bins|at number 4], [which one|I can't"
        " find it|nothing there]",
    ],
    "refund": [
        "I sent the {item} back {ago} and [still have no money|the money isn't back|nothing has"
        " been paid back]",
        "[how|where] do I [send back|return] the {item}? [it's too small|it doesn't fit|I changed"
        " my mind|wrong colour]",
        "I'd like [my money back|to be reimbursed] for the {item}, it [broke|stopped working|came"
        " apart] after {long}",
        "[when|how soon] will I [see|get] the [{money}|money] for the {item} I [returned|gave"
        " back]?",
        "can I [swap|exchange] the {wear} for [size {size}|a {colour} one|something else]?",
        "you [only|just] gave me {money} back [instead of all of it|but I paid more], [please check"
        "|why is that]",
        "I want to [cancel|call off] [the whole thing|order {order}|the {item}] and [get the money"
        " back|not pay for it]",
        "is there a label for [sending it back|returns]? [there was none in the box|I can't print]",
        "the {item} came [scratched|cracked|with a hole|broken], [I want to send it back|please"
        " take it back]",
        "can I still return [it|the {item}] after {long}? [the tag is still on|never used"
        "|unopened]",
        "the return was [received|scanned] {ago} [says the tracking|in your depot], so [where's"
        " the {money}|when do you pay]?",
        "[who pays|do I pay] the postage if I send the {item} back?",
        "the price dropped to {money} [a day later|{ago}], can I have the difference back?",
        "I got a voucher [but|although] I asked for [real money|it on my card|the {money} back]",
        "I don't want a replacement for the {item}, [just the money|give me back the {money}]",
        "[may|could] I bring the {item} back to [a shop|a pickup point] and be paid there?",
        "your mail said {money} is [on its way|approved] [{ago}|], my bank [has not seen it|shows"
        " nothing]",
        "one {item} was missing, [please pay that part back|I'd like the {money} for it]",
    ],
    "product_question": [
        "does the {wear} [run small|come in {colour}|fit a tall person|shrink in the wash]?",
        "is the {wear} [machine washable|waterproof|warm enough for {month}|lined]?",
        "is the {device} [suitable for kids|very loud|hard to clean|ok in a small kitchen]?",
        "what are the [measurements|dimensions] of the {item}? [it has to fit in a car|my shelf is"
        " {n2} cm|]",
        "[when|will] the {item} [be back|be restocked] in [{colour}|stock]?",
        "which [size|one] of the {wear} should I take if I'm [usually|normally] a {size}?",
        "what is the difference between the [old and the new|cheap and the dear] {device}?",
        "can the {device} be used [outside|in winter|in the bathroom|with a long cable]?",
        "does the {device} need [batteries|a special plug|its own charger], or is it all included?",
        "how [heavy|big] is the {item}[, roughly| with the box|]?",
        "do you [have|sell] spare parts for the {device}? [I lost the lid|the cable is worn|]",
        "how do I [clean|assemble|switch off|reset] the {device}? [no manual in the box|the leaflet"
        " is only in German|]",
        "is the {colour} in the photo the real colour[ of the {wear}|, it looks darker on my"
        " screen|]?",
        "would the {item} be a good [present|gift] for [a ten year old|my dad|a beginner]?",
        "I'm [looking at|thinking about] the {item}, [how many years does it last|is there a bigger"
        " version]?",
        "any [chance|plans] of a {item} [with a longer warranty|for left-handed people|without the"
        " logo]?",
        "the page says {n2} cm, is that [with|without] the [handle|lid|box]?",
        "[what's|what is] the {wear} made of? [my son has an allergy|I don't wear wool|]",
    ],
    "payment": [
        "[I was|I've been|my card was] charged [twice|two times|{money} too much] for [order"
        " {order}|the {item}|one order]",
        "my card [is|was|keeps being] [declined|refused|rejected] although [it works everywhere"
        " else|there is money on it]",
        "the [voucher|discount code|gift card] [isn't|wasn't] [accepted|taken off] at the checkout",
        "can I [pay|settle it] [by invoice|in instalments|by bank transfer|on delivery]?",
        "I need [an invoice|a receipt] [with VAT|for my company|for {order}]",
        "there is a [charge|debit] of {money} [from you|on my statement] that I [don't recognise|"
        "can't explain]",
        "the [total|amount] at the checkout [jumped|changed] [to|by] {money}, why?",
        "I paid [twice by mistake|{ago}] but it [still says unpaid|shows as open]",
        "[your site|the checkout|the page] [froze|crashed] after I [typed|put in] my card, did it"
        " [go through|work]?",
        "you sent me a reminder for {money}, [I paid {ago}|that is settled already]",
        "do you take [cards from abroad|prepaid cards|cheques]?",
        "the bank [wants a code|asks to confirm] but [I never get it|no text comes], so I can't"
        " [finish|pay]",
        "why was {money} taken [before it shipped|when nothing has been sent]?",
        "[can you|please] [split|change] the bill [over two cards|to my firm|from {person} to me]?",
        "the invoice for {order} has the wrong [name|address|VAT number]",
        "the {money} [postage|shipping fee] was added although I'm over the free limit",
        "is it safe to [leave|save] my card [with you|in the shop]? and [how do I take it off|who"
        " can see it]?",
    ],
    "account": [
        "I [can't|cannot] [log in|sign in|get in] [any more|since {since}|with my old password]",
        "the [password|reset] [mail|link] [never comes|doesn't work|has expired]",
        "please [change|update] my [email|phone number|surname] [to the new one|, I got married|]",
        "how do I [delete|close] my [account|profile] [and all my data|for good|]?",
        "[someone|a stranger] [logged in|ordered something] [as me|under my name], [please lock"
        " it|what should I do]?",
        "it says my email is [already taken|unknown] [but I have shopped here for years|]",
        "I have two [accounts|profiles], can you [merge|join] them?",
        "where [can|do] I see my [old orders|points|saved addresses]? [the page is empty|]",
        "my [loyalty|bonus] points [are gone|have disappeared|went down] [since {since}|after the"
        " update|]",
        "the [code|text] for logging in [arrives too late|goes to my old phone|is always wrong]",
        "[stop|please stop] sending me [newsletters|mails], I [unsubscribed|clicked the link]"
        " [three times|{ago}]",
        "your app [throws me out|closes|wants a new password] [every time|each morning]",
        "I [lost|changed] my phone and can't [confirm|get the code] any more",
        "my account is [locked|blocked] [after three tries|for no reason|since {since}]",
        "can {who} use [the same|my|one] login [on two phones|at the same time]?",
        "I signed up with [the wrong|a misspelt] email, how do I [correct|fix] that?",
        "the site greets me as {person}, that is not [me|my name]",
    ],
    "complaint": [
        "this is the [second|third|fourth] time [I write|I call] and [nobody answers|nothing"
        " happens]",
        "your [{carrier}|man] [threw|dumped] the {parcel} [over the fence|in the rain|in a puddle]"
        " [and drove off|], [is that normal|what a joke|shame on you]",
        "[great|brilliant] service, really. {long} and not [one reply|a word] from you",
        "I have been on hold for [40 minutes|an hour], [ridiculous|this is a bad joke]",
        "the person on the [phone|chat] was [rude|very impolite] and [hung up|laughed]",
        "[never again|I'm done with you]. {long} of waiting for a {thing} [and excuses|]",
        "you [promised|told me] {day}, then {day}, then {day}. [I don't believe a word|Enough]",
        "the quality [has gone downhill|is a disgrace], the {item} [looks used|smells of smoke]"
        " and nobody [cares|says sorry]",
        "I'm [really|very|so] [disappointed|annoyed|fed up] with how you [handled|dealt with]"
        " [this|my return|my order]",
        "your website [lied|is misleading] about the [{thing}|stock|price], [not fair|that's not"
        " ok]",
        "every time I [ask|call] I get a different [answer|story], [who is in charge|does anyone"
        " read this]",
        "a [bot|robot] that says 'we understand' [is no help|five times]! I want a [human|manager]",
        "a {thing} for {money} that [breaks|falls apart] after {long} is [an insult|junk]",
        "[took|it took] you {long} to [answer|pack one {thing}], a [poor|sad] show",
        "I will [leave a bad review|tell everyone|go to the consumer office] if [this goes on|I"
        " hear nothing by {day}]",
        "you [closed|marked] my case as solved [without asking|and it is not]",
    ],
    "praise": [
        "[just|only] wanted to say [thanks|thank you], the {item} is [lovely|perfect|great]",
        "{person} from your team [was so kind|sorted everything in minutes|deserves a raise]",
        "[ordered|bought] {ago} and it [was here|came] [the next day|in no time], [well done|wow]",
        "[best|nicest] shop I know, [keep it up|will come back|never had a problem]",
        "the {item} is [even better than|just like|prettier than] [in the photo|I hoped]",
        "my money was back [within a day|before I asked], [that's how it should be|impressive]",
        "[I love|we love] the {item}, [five stars|my kids fight over it|use it every day]",
        "[no|not one] complaint [from me|at all], [everything|all of it] was [spot on|as promised]",
        "I was angry [{ago}|at first], but you [made it right|fixed it so fast], [hats off|thank"
        " you]",
        "[please tell|pass it on to] the {carrier}: he [carried it up four floors|waited for me],"
        " [a gem|so nice]",
        "[lovely|beautiful] packaging and [a handwritten note|no plastic], [made my day|thank you]",
        "[finally|at last] a {thing} that [does not break|fits]. [Happy|Very happy] [customer|]",
    ],
    "other": [
        "do you have any [jobs|openings|internships] in {city}?",
        "are you open on [{day}|public holidays]? [I'd like to come by|]",
        "I [write|work] for a school [paper|magazine], could I [interview|visit] you?",
        "we [make|sell] {thing} parts and would like to [supply|work with] you",
        "[hello|test], is this a [real person|human]?",
        "[sorry, wrong|oops, wrong] [chat|number], [ignore this|please delete]",
        "is there a [shop|showroom] [in|near] {city}?",
        "can our [club|charity] ask for a [donation|sponsor]? [we collect for a new hall|]",
        "what do you do [about|with] [old packaging|the environment|plastic]?",
        "who [drew|made] the [advert|picture] in your window? [I like it|my son wants to know]",
        "[is it true|I read] that you are [opening|closing] in {city}?",
        "[found|I found] a [purse|key] in front of your shop [{ago}|]",
    ],
}

SHORT_EN: dict[str, list[str]] = {
    "delivery": [
        "{parcel} [still not here|never came|lost?]",
        "[any news|news] on {order}[?|??]",
        "when does the {thing} come",
        "{thing} not here yet",
        "[change|new] address for {order}",
        "tracking [dead|stuck] since {day}",
        "still waiting for [the|my] {thing}",
        "[wrong|empty] box, {order}",
    ],
    "refund": [
        "[return|send back] {thing} how",
        "{thing} too [big|small], [swap|back]?",
        "[money|{money}] back [when|please]",
        "cancel {order} [pls|please|now]",
        "{thing} broken, want [money|new one]",
        "still waiting for [the|my] {money}",
        "label for {order}[?|]",
    ],
    "product_question": [
        "{wear} in {colour}?",
        "[how big is|size of] the {thing}",
        "{wear} [waterproof|washable|in stock]?",
        "is the {thing} good[?|]",
        "[any|got] {wear} in {size}",
        "{thing} or {thing}, which is better?",
    ],
    "payment": [
        "[charged|paid] twice, {order}",
        "[invoice|receipt] for {order} [please|]",
        "code [not working|refused]",
        "what is this {money} [?|from {day}]",
        "card [declined|refused] again",
        "pay [later|in parts] for a {thing}?",
    ],
    "account": [
        "[can't|cant] get in [since {day}|]",
        "forgot my password [again|]",
        "delete my [profile|data] [please|]",
        "no [code|reset mail] [since {day}|]",
        "[new|change] email [please|address]",
        "points gone[?|, why]",
    ],
    "complaint": [
        "worst [shop|service] ever",
        "[still|again] no [answer|reply], {long}",
        "your {carrier} is a [joke|clown]",
        "{long} for a {thing}, seriously?",
        "I want a manager [now|today]",
        "never [buying|ordering] [here|a {thing}] again",
    ],
    "praise": [
        "[love|adore] the {thing}",
        "[great|top|super] {thing}, [thanks|cheers]",
        "{thing} arrived, [perfect|all good], [thanks|ta]",
        "thanks {person}, [you're|ur] [great|the best]",
        "[fast|quick] as always",
    ],
    "other": [
        "[anyone|someone] there?",
        "open on {day}?",
        "[jobs|work] in {city}",
        "shop in {city}?",
        "wrong chat, sorry {person}",
    ],
}

POINT_ZH: dict[str, list[str]] = {
    "delivery": [
        "[我的|我买的|]{件}[怎么还没到|什么时候能到|到哪了]，[都等了{久}了|{时}下的单]",
        "物流[{久}没动了|一直不更新|停在{城}不走了]，[帮忙催一下|是不是丢了]",
        "显示[已签收|派送成功]，[可是我没收到|家里没人收过]",
        "能不能[改送到公司|换个地址|放驿站]？[白天家里没人|我搬到{城}了]",
        "[请问|想问下]{时}拍的{件}[发货了没有|从哪里发|几天能到{城}]",
        "取件码[没收到|是错的]，[驿站说查不到|东西在哪]",
        "[买了两件|一共三个箱子]只到了一个，{件}[还在路上吗|去哪了]",
        "快递[打电话我没接到|说地址不对]，[能再送一次吗|麻烦重新安排]",
        "[能赶在周末前到吗|能加急吗]，{件}[要送人|急用]",
    ],
    "refund": [
        "{件}退回去[{久}了|已经签收了]，[钱还没到账|什么时候给我钱]",
        "[不合适|尺码小了|颜色不喜欢]，{件}[怎么退|能换一件吗]",
        "{件}用了{久}就坏了，[我要退|把钱退给我]",
        "[只退了我{钱}|少退了{钱}]，[麻烦核实|怎么算的]",
        "[不想要了|拍错了]，[能取消吗|帮我把单子取消]，钱[原路返回|退到卡里]吧",
        "[退货|寄回去]的运费[谁出|算我的吗]？",
        "刚买完{件}就降了{钱}，[差价能退吗|补我差价]",
        "收到的{件}[有划痕|破了个洞|是坏的]，[不要换新，退钱就行|想寄回去]",
    ],
    "product_question": [
        "{衣}[偏大还是偏小|起球吗|防水吗|能机洗吗]？",
        "[身高一米七|平时穿M码|体重六十公斤]，{衣}[选什么码|穿得下吗]",
        "{件}[什么时候补货|还有货吗|有小一点的吗]",
        "请问{衣}是什么[材质|面料]？[孩子皮肤敏感|]",
        "{物}的新款和旧款[有什么区别|能混着用吗|哪个好]",
        "{电}[怎么安装|怎么清洗|怎么关机]，[没看到说明书|说明书看不懂]",
        "这个{电}[多重|多大|声音大不大]，[宿舍能用吗|放得下吗]",
        "图片上的{色}[和实物一样吗|会不会偏深]？",
    ],
    "payment": [
        "[同一个单子|{件}]扣了我两次[钱|款]，[怎么回事|请查一下]",
        "[优惠券|红包|折扣码][用不了|没减]，[结算还是{钱}|显示无效]",
        "[银行卡|信用卡]一直[付不了|提示失败]，[卡里有钱的|别的店都能用]",
        "[麻烦|能不能]开[张|个][发票|专票]，[抬头要写公司|{号}]",
        "账单上有一笔{钱}，[不知道是什么|不是我买的吧]",
        "[可以|能]分期吗？{物}[有点贵|一次付不起]",
        "[付了钱|钱扣了]，[还显示待支付|页面卡住了]，[算成功吗|怎么办]",
        "满了免邮的数，[怎么还收运费|还是多收了{钱}]",
    ],
    "account": [
        "[登不上去了|登录不了]，[密码肯定没错|换了手机之后就这样]",
        "验证码[一直收不到|发到旧号码上了]，[怎么办|帮我改一下]",
        "[我要|怎么]注销[账号|账户]，[资料都删掉|以后不用了]",
        "积分[怎么没了|少了一半]，[{时}还在|更新以后就没了]",
        "[有人|别人]用我的号[下单|登录过]，[先帮我冻结|怎么办]",
        "[想改|怎么改][手机号|昵称|绑定的邮箱]，[页面找不到|旧的不用了]",
        "我有两个号，[能合并吗|积分能放一起吗]",
        "app[老是闪退|每次都要重新登录]，[{色}手机，旧款的|更新过了也没用]",
    ],
    "complaint": [
        "[第三次|又]来问了，[没人管|每次说法都不一样]，[太失望了|到底谁负责]",
        "[客服|电话里那位][态度太差|爱答不理|直接挂我电话]",
        "快递员把箱子[往门口一扔|丢在雨里]就走，[有这么送货的吗|真服了]",
        "[等了{久}|{久}了]就给我一句‘正在处理’，[骗人呢|有意思吗]",
        "{件}[质量太差|像二手的]，还[说是我弄的|不承认]，[再也不来了|差评]",
        "[真是好服务|你们可真行]，{物}坏了[三次|两回]，[一句道歉都没有|没人理]",
        "[说好{时}到|说好上门]，[放我鸽子|白请一天假]，[投诉|必须给个说法]",
    ],
    "praise": [
        "{件}[特别好看|比图片还漂亮|用着很顺手]，[谢谢|下次还来]",
        "[快递小哥|客服小姐姐]人[真好|特别耐心]，[给个好评|表扬一下]",
        "{时}下单[今天就到了|第二天就到]，[太快了|没想到]",
        "退款[秒到|当天就到]，[服务没得说|这家店靠谱]",
        "[没什么好挑的|挑不出毛病]，{件}[全家都喜欢|值这个价]",
        "本来[挺生气|想投诉]的，[处理得又快又好|后来给我解决了]，[赞|谢谢你们]",
    ],
    "other": [
        "你们[招人|招实习生]吗？我在{城}",
        "{城}有[门店|实体店]吗，[想去看看|周末开门吗]",
        "[是真人吗|有人在吗]，[随便问问|还是机器人]",
        "[发错了|找错人了]，[不好意思|请忽略]",
        "我们是做{物}的[工厂|厂家]，[想合作|找采购谈谈]",
    ],
}

SHORT_ZH: dict[str, list[str]] = {
    "delivery": ["{物}[到哪了|还没到]", "[催一下|查一下]{号}", "{久}了还没[来|收到]"],
    "refund": ["{物}[怎么退|想换]", "钱[啥时候退|还没退]，{号}", "[取消|不要了]{号}"],
    "product_question": ["{物}有{色}吗", "{物}[多大|结实不|有货吗]", "{物}好用吗"],
    "payment": ["[开票|发票]{号}", "{物}[多扣钱了|能分期不]", "[券|红包]买{物}用不了"],
    "account": ["[登不上|密码忘了]，{时}起", "[改|换]手机号，尾号{n4}", "积分少了{n3}"],
    "complaint": ["{久}没人[理|回]", "{物}[太差了|垃圾]", "[差评|投诉]，{物}"],
    "praise": ["{物}[很好|不错|喜欢]", "[好评|赞]，{物}[收到了|很棒]"],
    "other": ["{城}有店吗", "{城}招人不", "[在吗|有人吗]，我在{城}"],
}

POINT_MIXED: dict[str, list[str]] = {
    "delivery": ["我的order {order} [还没到|到哪了]，tracking [{久}没更新|一直不动]"],
    "refund": ["我想return这个{thing}，[颜色不对|broken了]，[怎么寄回|label在哪]"],
    "product_question": ["请问这个{wear} [有{colour}吗|waterproof吗|size偏大吗]"],
    "payment": ["[discount code|voucher] [用不了|没减]，{thing}还是{money}"],
    "account": ["[reset password|login code]的[邮件|短信][没收到|打不开]，{时}开始"],
    "complaint": ["[customer service|你们的support]{久}不回，{thing}的事[没人管|really bad]"],
    "praise": ["{thing}收到了，[love it|perfect]，[谢谢|thank you] {person}"],
    "other": ["你们[hiring|招intern]吗，我在{city}"],
}

# -- beside the point: true, said in passing, and about another class's subject --------------------

ASIDE_EN: dict[str, list[str]] = {
    "delivery": [
        "The {parcel} [came|arrived|was delivered] {ago}, [that's fine|on time].",
        "[It's not about|I don't mean] the delivery, that one [came|arrived] {ago}.",
        "The {carrier} [was quick|rang the bell] and tracking worked.",
        "I have waited {long} for it but [now it's here|it came].",
    ],
    "refund": [
        "I don't want [a refund|my money back].",
        "The refund for the {thing} [came|is here], [that part is settled|thanks].",
        "I [sent|gave] the other {thing} back {ago}[, all good|].",
        "[Returning|Sending back] the {thing} went [fine|smoothly].",
    ],
    "product_question": [
        "The {item} itself [is fine|fits|is the right size and colour].",
        "It's the {item} [with the long strap|from the {month} catalogue|in stock at the time].",
        "[I know|The page says] the {wear} is [waterproof|out of stock|made of cotton].",
    ],
    "payment": [
        "I paid [by card|with a voucher|{money}] [{ago}|straight away].",
        "[The invoice|My card] is [fine|ok], [no problem there|I checked].",
        "It [cost|was] {money} [with the code|after the discount|by invoice].",
    ],
    "account": [
        "I'm logged in [as usual|with my old account].",
        "I ordered [as a guest, without an account|from {person}'s account].",
        "My [account|profile] shows [it as closed|no change|the same].",
        "I [changed|reset] my password {ago}, [so it isn't that|that works].",
    ],
    "complaint": [
        "[This is not a complaint|I don't want to complain], [I'm just asking|honestly].",
        "I'm a bit [annoyed|disappointed], [to be honest|I must say].",
        "Nobody [answered|picked up] when I called {ago}.",
        "The last time was a [disaster|nightmare], [but never mind|hence my question].",
    ],
    "praise": [
        "[Love|I love] [your shop|the {thing}] [by the way|otherwise].",
        "Your colleague {person} was very [kind|helpful] {ago}.",
        "[Usually|So far] I'm a [very happy|happy] customer[, thank you|].",
        "The {thing} is [great|perfect], [thanks|no question].",
    ],
    "other": [
        "{who} was in your shop in {city} {ago}.",
        "I found you through [a friend|an advert|the radio].",
        "[It's|The weather is] [raining here again|so hot here], [by the way|lol].",
        "It's [for my mother's birthday|a present|for our new flat].",
        "[I'm not good with computers|Sorry for my English|I'm writing from my phone].",
        "My [dog|cat|son] [sends greetings|says hello], he [loved|ate] the box.",
        "We are [on holiday|away] from {day}.",
    ],
}
ASIDE_ZH: dict[str, list[str]] = {
    "delivery": ["东西{时}就到了，[快递没问题|挺快的]", "[不是问物流|物流不用查了]，{时}收到的"],
    "refund": ["[不用退款|我不退]", "上次{物}的退款[到账了|收到了]", "另一件{时}退掉了"],
    "product_question": ["{件}[本身没问题|尺码合适]", "就是那款{件}，[有货的时候买的|防水的]"],
    "payment": ["[用券|刷卡]付的{钱}", "[付款没问题|发票收到了]"],
    "account": ["[账号能登录|密码改过了]", "用我[妈|老婆|同学]的账号买的"],
    "complaint": ["[不是投诉|没有抱怨的意思]", "[{时}打电话没人接|有点失望]，[说实话|唉]"],
    "praise": ["你们家东西[一直不错|我挺喜欢]", "{时}那位客服[很耐心|人不错]"],
    "other": [
        "[我妈过生日要用|给孩子买的]",
        "[不太会用手机|打字慢见谅]",
        "[今天下雨|最近出差在{城}]",
    ],
}

# -- around it -----------------------------------------------------------------------------------

# Another matter, quoted in full and over: here only the few words around it tell what is wanted.
SOLVED = {
    "en": [
        "[Last week|On {day}|Earlier] I asked: '{point}' [That is settled|That's solved|No need to"
        " answer that].",
        "[Forget|Ignore] my [other|last|first] message ({point}), [it's sorted|I found out|all ok"
        " now].",
        "{who} wrote to you: '{point}' That [is done|was answered][, thanks|].",
        "[This is not|It's not] about '{point}' [any more|, that was {person}].",
    ],
    "zh": [
        "[上次|{时}]问的‘{point}’[已经解决了|不用管了]",
        "[别管|忽略]我之前那条（{point}）[，搞定了|]",
        "[我老婆|同事|我妈]问过‘{point}’，[那个好了|已经答复了]",
    ],
}
# Bad temper: in a complaint it is the point, elsewhere it only comes along.
GRIEF = {
    "en": [
        "This is the [second|third] time I [ask|write].",
        "[Not happy|Not amused].",
        "I'm [getting|slowly getting] [annoyed|tired of this].",
        "[Really|Honestly], {long}?",
        "[That's|This is] [not ok|a bit much|ridiculous].",
        "I [called|wrote] {ago} and [heard nothing|got no answer].",
    ],
    "zh": [
        "[问了两次了|第二次来问了]",
        "[有点|真的]失望",
        "都{久}了",
        "打电话也没人接",
        "这样[不行吧|太慢了]",
    ],
}
HELLO = {
    "en": [
        "[Hi|Hello|Hey|hi|Hiya][ there| all|][,|!|]",
        "[Good morning|Good evening|Dear team|Dear Sir or Madam|To whom it may concern][,|.]",
        "[Hello|Hi], [my name is {me}|{me} here|it's {me} again].",
        "[Not sure if this is the right place|I hope this reaches the right person]:",
        "[Hello|Hi], I [ordered|bought] a {item} [from you|in your shop] {ago}.",
    ],
    "zh": [
        "你好，",
        "您好，",
        "在吗？",
        "亲，",
        "客服你好，",
        "请问一下，",
        "那个，",
        "[早上|晚上]好，",
    ],
}
DETAIL = {
    "en": [
        "[Order|My order is|The order number is|Ref] {order}.",
        "It was order {order} for the {item}.",
        "[Bought|Ordered] {ago}, {money}, {order}.",
        "My number is {n4} {n3}, [call after six|evenings only].",
        "See [the photo|attached|screenshot].",
    ],
    "zh": ["{号}", "{号}，{时}买的", "电话尾号{n4}", "[图片|截图]发你了", "一共{钱}"],
}
# The first three of each suit any message, the others ask for something.
BYE = {
    "en": [
        "[Thanks|Thank you|Many thanks|Thx|Cheers][!|.|, {me}]",
        "[Best|Kind|Warm] [regards|wishes][,|] {me}",
        "[Sent from my phone|Have a nice day!|Greetings from {city}.]",
        "[Please|Pls] [let me know|answer|get back to me|help][.| soon.| today.]",
        "[What should I do now?|Hope to hear from you.|Thanks in advance.|No rush.]",
    ],
    "zh": ["谢谢", "谢谢啦～", "辛苦了", "麻烦了", "尽快回复", "急！", "在线等", "[盼复|等你消息]"],
}
# Between what is beside the point and the point.
JOIN = {
    "en": ["But ", "Now ", "Anyway, ", "So ", "However, ", "Well, ", "", "", ""],
    "zh": ["但是", "不过", "现在", "就是", "", "", ""],
}
EMOJI = {
    "praise": "😍 👍 🙏 😊 🎉 ⭐⭐⭐⭐⭐ 🥰".split(),
    "complaint": "😡 🙄 😤 👎 😒 🤦 😊".split(),
    "": "🙏 😊 🤔 😅 😢 📦 👍 🙂 😬".split(),
}
HURRIED = {
    "please": "pls",
    "you": "u",
    "your": "ur",
    "thanks": "thx",
    "because": "bc",
    "are": "r",
    "and": "&",
    "order": "ordr",
    "delivery": "delivry",
    "package": "pakage",
    "money": "mony",
    "account": "acount",
    "password": "pasword",
    "refund": "refound",
    "address": "adress",
    "receipt": "reciept",
    "怎么": "咋",
    "没有": "木有",
    "的": "滴",
    "在": "再",
    "账": "帐",
    "什么": "啥",
    "已经": "以经",
}

POINT = {"en": POINT_EN, "zh": POINT_ZH, "mixed": POINT_MIXED}
SHORT = {"en": SHORT_EN, "zh": SHORT_ZH}
ASIDE = {"en": ASIDE_EN, "zh": ASIDE_ZH}

# -- logic ---------------------------------------------------------------------------------------


class Writer:
    """Everything random, drawn from one seeded stream of `random()`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random
        self.kept: dict[str, str] = {}  # what stays the same throughout a message

    def chance(self, share: float) -> bool:
        return self.random() < share

    def pick(self, options: Sequence[str], skewed: bool = False) -> str:
        """One of the options; when skewed, the first are frequent and the last rare."""
        return options[int(len(options) * self.random() * (self.random() if skewed else 1.0))]

    def shuffled(self, values: list[str]) -> list[str]:
        keyed = [(self.random(), place) for place in range(len(values))]
        return [values[place] for _, place in sorted(keyed)]

    def fill(self, phrase: str) -> str:
        """The phrase with every `[a|b]` and `{slot}` decided, innermost first."""
        while match := re.search(r"\[([^\[\]]*)\]|\{([^{}\[\]]*)\}", phrase):
            name = match[2]
            if name in KEPT and name not in self.kept:
                self.kept[name] = self.fill(SLOTS[name])
            word = self.kept.get(name) or SLOTS.get(name) or self.pick(match[1].split("|"))
            phrase = phrase[: match.start()] + word + phrase[match.end() :]
        return phrase

    def message(self, label: str, second: str | None) -> str:
        """A message that wants `label` and, where it is ambiguous, also `second`."""
        self.kept = {}
        draw = self.random()
        tongue = "en" if draw > MIXED + CHINESE else "zh" if draw > MIXED else "mixed"
        if tongue == "mixed":
            parts = [self.pick([*HELLO["en"], "", "", "", ""]), self.pick(POINT[tongue][label])]
            parts.append(self.pick([*BYE["zh"], *BYE["en"], *[""] * 8]))
            return self.noise(self.fill(" ".join(filter(None, parts))), label, zh=True)
        if second is None and self.chance(BRIEF):
            return self.noise(self.fill(self.pick(SHORT[tongue][label])), label, tongue == "zh")

        point, before, after = POINT[tongue], list[str](), list[str]()
        subjects = self.shuffled([name for name in SHARES if name != label])
        for subject in subjects[: self.chance(0.5) + self.chance(0.25) + self.chance(0.1)]:
            (before if self.chance(0.6) else after).append(self.pick(ASIDE[tongue][subject]))
        if self.chance(QUOTED):
            asked = [name for name in ASKS if name != label]
            quote = self.pick(SOLVED[tongue]).replace("{point}", self.pick(point[self.pick(asked)]))
            (before if self.chance(0.7) else after).append(quote)
        if label == "complaint" and self.chance(0.6):  # about something, after all
            cause = self.pick(["delivery", "delivery", "refund", "payment"])
            before.append(self.pick(point[cause]))
        if label not in ("product_question", "praise", "other") and self.chance(0.25):
            after.insert(0, self.pick(GRIEF[tongue]))
        middle = self.pick(point[label], skewed=True)
        if before and self.chance(0.5):
            middle = self.pick(JOIN[tongue]) + middle
        wishes = [middle] if second is None else [middle, self.pick(point[second])]
        if self.chance(0.4):
            before.insert(0, self.pick(HELLO[tongue]))
        if self.chance(0.3) and label != "praise":
            after.append(self.pick(DETAIL[tongue]))
        if self.chance(0.35):
            after.append(self.pick(BYE[tongue][: 3 if label == "praise" else None]))
        sentences = [self.fill(part).strip() for part in [*before, *wishes, *after]]
        if tongue == "zh":
            text = "，".join(sentence.rstrip("，") for sentence in sentences)
            return self.noise(re.sub("([？！])，", r"\1", text), label, zh=True)
        careful = self.chance(0.8)
        text = ""
        for sentence in sentences:
            starts = careful and not text.endswith((", ", ": "))
            text += sentence[0].upper() + sentence[1:] if starts else sentence
            text += " " if sentence[-1] in ".?!:," or self.chance(0.1) else ". "
        return self.noise(text, label, zh=False)

    def noise(self, text: str, label: str, zh: bool) -> str:
        """The text as it was typed."""
        text = re.sub(r" +([,.?!])", r"\1", re.sub(r"\s+", " ", text)).strip()
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        if self.chance(0.15) and zh:
            wrong = self.pick([word for word in HURRIED if not word.isascii()])
            text = text.replace(wrong, HURRIED[wrong], 1)
        elif self.chance(0.15):
            text = " ".join(HURRIED.get(word, word) for word in text.split(" "))
        if self.chance(0.3):
            words = text.split(" ")
            text = " ".join(self.slip(word) if self.chance(0.09) else word for word in words)
        if self.chance(0.2):
            text = text.replace("'", "")
        if self.chance(0.2):
            text = re.sub(r"[.,](?= |$)", "", text) if not zh else re.sub("[，。]", " ", text)
        if self.chance(0.28):
            text = text.lower()
        elif self.chance(0.15 if label == "complaint" else 0.02):
            text = text.upper()
        if self.chance(0.1) and text[-1] in "?!？！":
            text += text[-1] * (1 + int(3 * self.random()))
        elif zh and text[-1] not in "？！～" and self.chance(0.3):
            text += self.pick(["。", "！", "～", "。。。", "!!"])
        if self.chance(0.3 if label == "praise" else 0.08):
            text += self.pick([" ", ""]) + self.pick(EMOJI.get(label, EMOJI[""]))
        return text

    def slip(self, word: str) -> str:
        """The word with two letters swapped, one dropped or one doubled."""
        if len(word) < 4 or not (word.isalpha() and word.isascii()):
            return word
        at, kind = 1 + int((len(word) - 2) * self.random()), self.random()
        if kind < 0.4:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        return word[:at] + word[at + 1 :] if kind < 0.7 else word[:at] + word[at] + word[at:]


def fold(text: str) -> str:
    """What is left of a text without case, spaces, digits, punctuation and emoji."""
    return "".join(filter(str.isalpha, text.casefold()))


def make(seed: int = SEED) -> dict[str, list[tuple[str, str]]]:
    """The rows of each split, as (text, label); no two texts of them all are alike when folded."""
    writer, seen, splits = Writer(seed), set[str](), dict[str, list[tuple[str, str]]]()
    for split, size in SIZES.items():
        wanted = [label for label, share in SHARES.items() for _ in range(round(size * share))]
        splits[split] = []
        for label in writer.shuffled(wanted):
            fate, other = writer.random(), writer.pick(CONFUSED[label])
            second = other if WRONG <= fate < WRONG + AMBIGUOUS else None
            while fold(text := writer.message(label, second)) in seen:
                pass
            seen.add(fold(text))
            splits[split].append((text, other if fate < WRONG else label))
    return splits


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the sample data of the generated project.")
    parser.add_argument("--out", type=Path, default=SAMPLE, help="folder (default: the sample/)")
    parser.add_argument("--check", action="store_true", help="only compare with what is there")
    arguments = parser.parse_args()
    differ = 0
    for split, rows in make().items():
        path = arguments.out / f"{split}.tsv"
        body = "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows]).encode()
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        elif not path.is_file() or path.read_bytes() != body:
            print(f"{path} is not what tools/make_sample.py writes; run it again", file=sys.stderr)
            differ = 1
    return differ


if __name__ == "__main__":
    sys.exit(main())
